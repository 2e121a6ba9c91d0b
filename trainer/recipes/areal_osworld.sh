#!/bin/bash
# OSWorld tasks with AReaL, Qwen3-VL-4B, 2 GPUs. See areal_osworld.yaml and lib.sh; slime's variables have no effect.

source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/lib.sh"
SUITE="${SUITE:-osworld}"
begin areal_osworld desktop/type-greeting "$@"
make_tasks

if ! ((DRY_RUN)) && ! "$PYTHON" -c "import areal" 2>/dev/null; then
   echo "areal: not installed for ${PYTHON}; see docs/adapters.md" >&2
   exit 1
fi
run "$PYTHON" -m trainer.adapters.areal.train --config "$CONFIG" "train_dataset.path=${PROMPT_DATA}"
