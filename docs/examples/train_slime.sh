#!/bin/bash
# GRPO with slime on drawn desktops, one GPU, in slime's container; see docs/train.md for the variables.
# SLIME_DIR, MODELS_DIR: slime's checkout, and the directory of the model Qwen3-0.6B. ENVD_TARGET: the daemon.
set -euo pipefail

export ENVD_TARGET="${ENVD_TARGET:-127.0.0.1:50051}"
recipes=$(python -c 'import trainer.recipes as r; print(*r.__path__)')
stage="${1:-smoke-env}" # smoke-env: desktops alone. smoke-text: one rollout. full: the training run

# What would run, without a GPU:
bash "$recipes/smoke_text.sh" --dry-run "$stage"
[[ "${DRY_RUN:-}" ]] || exec bash "$recipes/smoke_text.sh" "$stage"
