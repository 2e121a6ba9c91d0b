#!/bin/bash
# GRPO with slime on drawn desktops, one GPU, in slime's container; see docs/train.md for the variables.
# SLIME_DIR, MODELS_DIR: slime's checkout, and the directory of the model Qwen3-0.6B. ENVD_TARGET: the daemon.
#
# Usage: train_slime.sh [smoke-env|smoke-text|full]
#   smoke-env: desktops alone, without GPU and slime. smoke-text: one rollout. full: the training run
set -euo pipefail

export ENVD_TARGET="${ENVD_TARGET:-127.0.0.1:50051}" PYTHON="${PYTHON:-python}"
# What drawn desktops serve. For real machines: SUITE=desktop SMOKE_TASK=desktop/type-greeting
export SUITE="${SUITE:-fake}" SMOKE_TASK="${SMOKE_TASK:-fake/count-to-five}"
recipes=$("$PYTHON" -c 'import trainer.recipes as r; print(*r.__path__)')
stage="${1:-smoke-env}"

# What would run, without a GPU:
bash "$recipes/smoke_text.sh" --dry-run "$stage"
[[ "${DRY_RUN:-}" ]] || exec bash "$recipes/smoke_text.sh" "$stage"
