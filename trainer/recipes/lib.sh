# Sourced by the launchers. Usage of each: NAME.sh [--dry-run] STAGE
#
#   smoke-env   desktops only: one episode without actions. Needs no GPU and no model.
#   smoke-text  one rollout without pictures
#   smoke       one rollout with pictures
#   full        the complete run
#
# --dry-run prints the commands and runs nothing.
#
#   ENVD_TARGET  daemons: HOST:PORT, separated by commas (127.0.0.1:50051)
#   ENVD_TOKEN   their token, if they require one. Ray passes it on in its own environment. Never put it into an argument
#                or a runtime environment: every user of the cluster can read those.
#   SLIME_DIR    checkout of slime (/root/slime)     MEGATRON_DIR  checkout of Megatron (/root/Megatron-LM)
#   MODELS_DIR   checkpoints (/root/models)          RUN_DIR       output of the run (out/RECIPE-STAGE)
#   SUITE        suite of the data set               PROMPT_DATA   or an existing data set
#   VARIANTS     of each template in the data set (1)
#   NUM_GPUS     GPUs of this node
#   SMOKE_TASK   task of smoke-env, such as fake/count-to-five on drawn desktops; by default one of the recipe's suite

set -euo pipefail
export PYTHONUNBUFFERED=1
PYTHON="${PYTHON:-python3}"
ENVD_TARGET="${ENVD_TARGET:-127.0.0.1:50051}"
SLIME_DIR="${SLIME_DIR:-/root/slime}"
MEGATRON_DIR="${MEGATRON_DIR:-/root/Megatron-LM}"
MODELS_DIR="${MODELS_DIR:-/root/models}"
RAY_ADDRESS="${RAY_ADDRESS:-http://127.0.0.1:8265}"
DRY_RUN=0

# Arguments that several recipes share.
ENV_ARGS=(
   --input-key prompt
   --metadata-key metadata
   --apply-chat-template
   --custom-generate-function-path trainer.slime.hooks.generate
   --custom-rm-path trainer.slime.hooks.reward_func
   --custom-reward-post-process-path trainer.slime.hooks.normalize_rewards
   --dynamic-sampling-filter-path trainer.slime.hooks.keep_informative
   --custom-rollout-log-function-path trainer.slime.hooks.log_rollout
   --custom-eval-rollout-log-function-path trainer.slime.hooks.log_evaluation
)
# All tokens of a batch count equally; otherwise a token of a long episode counts for less.
LOSS_ARGS=(--calculate-per-token-loss)
CLIP_ARGS=(--eps-clip 0.2 --eps-clip-high 0.28)
ADAM_ARGS=(--lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)
RECOMPUTE_ARGS=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
PRECISION_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
)

# run WORD...: run a command, or print it quoted for a shell.
run() {
   if ((DRY_RUN)); then
      printf '%q ' "$@"
      echo
   else
      "$@"
   fi
}

# begin RECIPE SMOKE_TASK ARGUMENT...: parse the arguments and write the configuration; exits after stage smoke-env.
begin() {
   RECIPE="$1" SMOKE_TASK="${SMOKE_TASK:-$2}"
   shift 2
   if [[ "${1:-}" == --dry-run ]]; then
      DRY_RUN=1
      shift
   fi
   STAGE="${1:-}"
   case "$STAGE" in
      smoke-env | smoke-text | smoke | full) ;;
      *)
         echo "usage: ${RECIPE}.sh [--dry-run] smoke-env|smoke-text|smoke|full" >&2
         exit 2
         ;;
   esac
   # Absolute: a Ray job runs in another directory.
   RUN_DIR="$(realpath -m -- "${RUN_DIR:-out/${RECIPE}-${STAGE}}")"
   CONFIG="${RUN_DIR}/config.yaml"
   if [[ "$STAGE" == smoke-env ]]; then
      run "$PYTHON" -m trainer play "$SMOKE_TASK" --by null --envd "$ENVD_TARGET" --out "$RUN_DIR"
      exit 0
   fi
   if ((DRY_RUN)); then
      # Check the configuration in a dry run as well.
      "$PYTHON" -m trainer recipe config "$RECIPE" --stage "$STAGE" --envd "$ENVD_TARGET" >/dev/null
   else
      mkdir -p "$RUN_DIR"
      "$PYTHON" -m trainer recipe config "$RECIPE" --stage "$STAGE" --envd "$ENVD_TARGET" >"$CONFIG"
   fi
}

# make_tasks: write the data set if PROMPT_DATA names none. The held-out tasks are in the same directory.
make_tasks() {
   if [[ -n "${PROMPT_DATA:-}" ]]; then
      return
   fi
   PROMPT_DATA="${RUN_DIR}/prompts/train.jsonl"
   if [[ ! -f "$PROMPT_DATA" ]]; then
      run "$PYTHON" -m trainer data prompts --envd "${ENVD_TARGET%%,*}" --suite "${SUITE:-}" \
         --variants "${VARIANTS:-1}" --out "${RUN_DIR}/prompts"
   fi
}

# load_model SCRIPT: set slime's MODEL_ARGS of a model. Without slime, a dry run shows the script's name instead.
load_model() {
   if [[ -f "${SLIME_DIR}/scripts/models/$1" ]]; then
      source "${SLIME_DIR}/scripts/models/$1"
   elif ((DRY_RUN)); then
      MODEL_ARGS=(--spec "MODEL_ARGS of" "scripts/models/$1")
   else
      echo "${SLIME_DIR}/scripts/models/$1: not found; set SLIME_DIR to a checkout of slime" >&2
      exit 1
   fi
}

# batches ROLLOUTS GROUPS MEMBERS UPDATE: append the batch sizes to ROLLOUT_ARGS.
batches() {
   ROLLOUT_ARGS+=(--num-rollout "$1" --rollout-batch-size "$2" --n-samples-per-prompt "$3" --global-batch-size "$4")
}

# train ACTOR_GPUS: submit slime's train.py with the arrays of the recipe.
train() {
   submit train.py --actor-num-nodes 1 --actor-num-gpus-per-node "$1" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" \
      "${ENV_ARGS[@]}" --prompt-data "$PROMPT_DATA" --custom-config-path "$CONFIG" --rollout-shuffle \
      "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${LOSS_ARGS[@]}" --optimizer adam "${OPTIMIZER_ARGS[@]}" \
      "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "${PRECISION_ARGS[@]}" "${MISC_ARGS[@]}"
}

# submit SCRIPT ARGUMENT...: submit slime's SCRIPT as a Ray job. Starts Ray on this node if none answers; stops nothing.
submit() {
   local script="$1" nvlink=0
   shift
   if command -v nvidia-smi >/dev/null && nvidia-smi topo -m 2>/dev/null | grep -q 'NV[0-9]'; then
      nvlink=1
   fi
   export no_proxy="127.0.0.1,${MASTER_ADDR:-127.0.0.1}"
   if ((DRY_RUN)) || ! ray status >/dev/null 2>&1; then
      run ray start --head --node-ip-address "${MASTER_ADDR:-127.0.0.1}" --num-gpus "$NUM_GPUS" \
         --disable-usage-stats --dashboard-host 127.0.0.1 --dashboard-port 8265
   fi
   local environment
   environment=$(printf '{"env_vars": {"PYTHONPATH": "%s", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "%d"}}' \
      "${MEGATRON_DIR}:${SLIME_DIR}" "$nvlink")
   run ray job submit --address "$RAY_ADDRESS" --runtime-env-json "$environment" \
      -- "$PYTHON" "${SLIME_DIR}/${script}" "$@"
}
