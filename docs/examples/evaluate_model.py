"""Evaluate a model behind an OpenAI-compatible endpoint. `pip install '.[evaluate]'`

Usage: evaluate_model.py [http://127.0.0.1:8000/v1 [MODEL]]

Without a URL it evaluates the built-in stand-in, which declares every task done at once.
"""

import json
import os
import subprocess
import sys

command = [sys.executable, "-m", "trainer", "eval", "--envd", os.environ.get("ENVD_TARGET", "127.0.0.1:50051")]
match sys.argv[1:]:
    case []:
        command += ["--by", "null"]
    case [url] if not url.startswith("-"):
        command += ["--endpoint", url]
    case [url, model]:
        command += ["--endpoint", url, "--model", model]
    case _:
        sys.exit(__doc__)
# The tasks to play; `--split held_out` plays those that training never sees.
command += ["--task", "fake/enable", "--task", "fake/save-note", "--split", "all"]
command += ["--out", "out/evaluate-model", "--json"]
done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
if done.returncode not in (0, 3):  # 3: some attempts were lost to errors
    sys.exit(done.returncode)
print(json.dumps(json.loads(done.stdout), indent=1))
