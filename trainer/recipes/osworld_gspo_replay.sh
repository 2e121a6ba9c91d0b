#!/bin/bash
# OSWorld tasks, GSPO, Qwen3-VL-4B, 4 GPUs for training and 4 for rollouts. See osworld_gspo_replay.yaml and lib.sh.

source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/lib.sh"
NUM_GPUS="${NUM_GPUS:-8}"
SUITE="${SUITE:-osworld}"
begin osworld_gspo_replay desktop/type-greeting "$@"
make_tasks
MODEL_ARGS_ROTARY_BASE=5000000
load_model qwen3-4B.sh

CKPT_ARGS=(
   --hf-checkpoint "${MODELS_DIR}/Qwen3-VL-4B-Instruct"
   --load "${MODELS_DIR}/Qwen3-VL-4B-Instruct"
   --ref-load "${MODELS_DIR}/Qwen3-VL-4B-Instruct" # reference policy of the KL term
   --megatron-to-hf-mode bridge
   --save "${RUN_DIR}/checkpoints"
   --save-interval 1
)
ROLLOUT_ARGS=(
   --rollout-temperature 0.8
   --data-source-path trainer.slime.hooks.data_source # saves the replay pool with each checkpoint
   --rollout-stop "</tool_call>"
   --rollout-max-context-len 13312
   --rollout-max-response-len 400
)
case "$STAGE" in
   full) batches 8 8 2 2 ;; # 8 x 2 = 16 samples a rollout, 16 / 2 = 8 updates
   *) batches 1 2 2 2 ;;
esac
GRPO_ARGS=(
   --advantage-estimator gspo
   --eps-clip 3.5e-4
   --use-kl-loss
   --kl-loss-coef 0.01
   --kl-loss-type low_var_kl
   --entropy-coef 1e-4
   --use-tis
)
OPTIMIZER_ARGS=(--lr 5e-7 "${ADAM_ARGS[@]}" --clip-grad 0.5)
PERF_ARGS=(
   --tensor-model-parallel-size 4
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   "${RECOMPUTE_ARGS[@]}"
   --use-dynamic-batch-size # an episode may have several rows
   --max-tokens-per-gpu 13312
)
SGLANG_ARGS=(
   --rollout-num-gpus 4
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.7
   --sglang-server-concurrency 4 # concurrent episodes of each of 4 engines; 16 machines
)
MISC_ARGS=()

train 4
