#!/bin/bash
# Windows tasks, GRPO, Qwen3-VL-2B, 8 GPUs with training and rollout on the same ones. See windows_grpo.yaml and lib.sh.

source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/lib.sh"
NUM_GPUS="${NUM_GPUS:-8}"
SUITE="${SUITE:-windows}"
begin windows_grpo windows/note "$@"
make_tasks

MODEL_ARGS_ROTARY_BASE=5000000
load_model qwen3-1.7B.sh

CKPT_ARGS=(
   --hf-checkpoint "${MODELS_DIR}/Qwen3-VL-2B-Instruct"
   --load "${MODELS_DIR}/Qwen3-VL-2B-Instruct"
   --megatron-to-hf-mode bridge
   --save "${RUN_DIR}/checkpoints"
   --save-interval 1
)

ROLLOUT_ARGS=(
   --prompt-data "$PROMPT_DATA"
   --custom-config-path "$CONFIG"
   --rollout-shuffle
   --rollout-temperature 1.0
   --rollout-max-context-len 16384
   --rollout-max-response-len 256
)
case "$STAGE" in
   full)
      # 8 x 8 = 64 samples a rollout, 64 / 32 = 2 updates
      ROLLOUT_ARGS+=(--num-rollout 100 --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 32)
      ;;
   *)
      ROLLOUT_ARGS+=(--num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 4 --global-batch-size 8)
      ;;
esac

GRPO_ARGS=(
   --advantage-estimator grpo
   --kl-loss-coef 0.0
   --entropy-coef 0.001
   --eps-clip 0.2
   --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 3e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

PERF_ARGS=(
   --tensor-model-parallel-size 4
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 16384
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.6
   # Episodes at once for each of 8 engines: 64 in all, as many machines.
   --sglang-server-concurrency 8
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
