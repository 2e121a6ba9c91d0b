"""Evaluate a model behind an OpenAI-compatible endpoint. `pip install '.[evaluate]'`

Usage: evaluate_model.py http://127.0.0.1:8000/v1 [MODEL]
"""

import json
import os
import subprocess
import sys

if len(sys.argv) < 2:
    sys.exit(__doc__)
endpoint, *model = sys.argv[1:]
command = ["trainer", "eval", "--endpoint", endpoint, "--envd", os.environ.get("ENVD_TARGET", "127.0.0.1:50051")]
if model:
    command += ["--model", model[0]]
# The tasks to play; `--split held_out` plays those that training never sees.
command += ["--task", "fake/enable", "--task", "fake/save-note", "--split", "all", "--json"]
done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
if done.returncode not in (0, 3):  # 3: some attempts were lost to errors
    sys.exit(done.returncode)
print(json.dumps(json.loads(done.stdout), indent=1))
