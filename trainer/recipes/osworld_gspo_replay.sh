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
   # Of the policy that the KL term holds on to.
   --ref-load "${MODELS_DIR}/Qwen3-VL-4B-Instruct"
   --megatron-to-hf-mode bridge
   --save "${RUN_DIR}/checkpoints"
   --save-interval 1
)

ROLLOUT_ARGS=(
   --prompt-data "$PROMPT_DATA"
   --custom-config-path "$CONFIG"
   --rollout-shuffle
   --rollout-temperature 0.8
   # The pool of successes is saved with each checkpoint.
   --data-source-path trainer.slime.replay.data_source
   --rollout-stop "</tool_call>"
   --rollout-max-context-len 13312
   --rollout-max-response-len 400
)
case "$STAGE" in
   full)
      # 8 x 2 = 16 samples a rollout, 16 / 2 = 8 updates
      ROLLOUT_ARGS+=(--num-rollout 8 --rollout-batch-size 8 --n-samples-per-prompt 2 --global-batch-size 2)
      ;;
   *)
      ROLLOUT_ARGS+=(--num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2 --global-batch-size 2)
      ;;
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

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 5e-7
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
   --clip-grad 0.5
)

PERF_ARGS=(
   --tensor-model-parallel-size 4
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   # An episode may have several rows, so their number is not known beforehand.
   --use-dynamic-batch-size
   --max-tokens-per-gpu 13312
)

SGLANG_ARGS=(
   --rollout-num-gpus 4
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.7
   # Episodes at once for each of 4 engines: 16 in all, as many machines.
   --sglang-server-concurrency 4
)

MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
)

submit train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 4 \
   "${MODEL_ARGS[@]}" \
   "${CKPT_ARGS[@]}" \
   "${ENV_ARGS[@]}" \
   "${ROLLOUT_ARGS[@]}" \
   "${GRPO_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${PERF_ARGS[@]}" \
   "${SGLANG_ARGS[@]}" \
   "${MISC_ARGS[@]}"
