#!/bin/bash
# Desktop tasks without pictures, GRPO, Qwen3-0.6B, one GPU. See smoke_text.yaml and lib.sh.

source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/lib.sh"
NUM_GPUS="${NUM_GPUS:-1}"
SUITE="${SUITE:-desktop}"
begin smoke_text desktop/type-greeting "$@"
make_tasks

load_model qwen3-0.6B.sh

CKPT_ARGS=(
   --hf-checkpoint "${MODELS_DIR}/Qwen3-0.6B"
   # Made by slime's tools/convert_hf_to_torch_dist.py.
   --ref-load "${MODELS_DIR}/Qwen3-0.6B_torch_dist"
   --load "${RUN_DIR}/checkpoints"
   --save "${RUN_DIR}/checkpoints"
   --save-interval 10
)

ROLLOUT_ARGS=(
   --prompt-data "$PROMPT_DATA"
   --custom-config-path "$CONFIG"
   --rollout-shuffle
   --rollout-temperature 1.0
   --rollout-max-context-len 8704
   --rollout-max-response-len 256
)
case "$STAGE" in
   full)
      # 4 x 4 = 16 samples a rollout, 16 / 16 = 1 update
      ROLLOUT_ARGS+=(--num-rollout 10 --rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16)
      ;;
   *)
      ROLLOUT_ARGS+=(--num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2 --global-batch-size 4)
      ;;
esac

GRPO_ARGS=(
   --advantage-estimator grpo
   --kl-loss-coef 0.0
   --entropy-coef 0.0
   --eps-clip 0.2
   --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

PERF_ARGS=(
   --tensor-model-parallel-size 1
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.4
   --sglang-server-concurrency 16
)

MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
   --colocate
)

submit train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node "$NUM_GPUS" \
   "${MODEL_ARGS[@]}" \
   "${CKPT_ARGS[@]}" \
   "${ENV_ARGS[@]}" \
   "${ROLLOUT_ARGS[@]}" \
   "${GRPO_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${PERF_ARGS[@]}" \
   "${SGLANG_ARGS[@]}" \
   "${MISC_ARGS[@]}"
