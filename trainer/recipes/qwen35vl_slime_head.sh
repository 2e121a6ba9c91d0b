#!/bin/bash
# Desktop tasks, GRPO, Qwen3.5-VL 35B-A3B at slime's head, 8 GPUs. See qwen35vl_slime_head.yaml and lib.sh.

source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/lib.sh"
NUM_GPUS="${NUM_GPUS:-8}"
SUITE="${SUITE:-desktop}"
VARIANTS="${VARIANTS:-20}"
begin qwen35vl_slime_head desktop/type-greeting "$@"
make_tasks

load_model qwen3.5-35B-A3B-vl.sh

CKPT_ARGS=(
   --hf-checkpoint "${MODELS_DIR}/Qwen3.5-35B-A3B"
   --load "${MODELS_DIR}/Qwen3.5-35B-A3B"
   --save "${RUN_DIR}/checkpoints"
   --save-interval 10
)

ROLLOUT_ARGS=(
   --prompt-data "$PROMPT_DATA"
   --custom-config-path "$CONFIG"
   --rollout-shuffle
   --rollout-temperature 0.8
   --rollout-max-context-len 26624
   --rollout-max-response-len 512
)
case "$STAGE" in
   full)
      # 8 x 8 = 64 samples a rollout, 64 / 64 = 1 update of 64 / (4 data parallel x 1) = 16 micro-batches
      ROLLOUT_ARGS+=(--num-rollout 100 --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64)
      ;;
   *)
      ROLLOUT_ARGS+=(--num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 4 --global-batch-size 8)
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
   # The model has two query groups, so no more than this.
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 8
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   # Its gated delta layers take no packed rows.
   --micro-batch-size 1
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 8
   --sglang-ep-size 8
   --sglang-mem-fraction-static 0.6
   # Episodes at once for the one engine: 64, as many machines.
   --sglang-server-concurrency 64
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
