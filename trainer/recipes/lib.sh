# What the launchers share; sourced, never run. Usage of each: NAME.sh [--dry-run] STAGE
#
#   smoke-env   desktops alone: one episode that nobody plays. Needs no GPU and no model.
#   smoke-text  one rollout without pictures
#   smoke       one rollout with pictures
#   full        the whole run
#
# --dry-run prints what would be run, and runs nothing.
#
#   ENVD_TARGET  daemons, HOST:PORT with commas between them (127.0.0.1:50051)
#   ENVD_TOKEN   their token, if they want one. It reaches the rollout through Ray's own environment: never put it into
#                an argument or into a runtime environment, which every user of the cluster can read.
#   SLIME_DIR    slime's checkout (/root/slime)      MEGATRON_DIR  Megatron's (/root/Megatron-LM)
#   MODELS_DIR   checkpoints (/root/models)          RUN_DIR       what the run writes (out/RECIPE-STAGE)
#   SUITE        suite that the data set is made of  PROMPT_DATA   or a data set of your own
#   VARIANTS     of each template, in that data set (1)
#   NUM_GPUS     GPUs of this node

set -euo pipefail
export PYTHONUNBUFFERED=1
PYTHON="${PYTHON:-python3}"
ENVD_TARGET="${ENVD_TARGET:-127.0.0.1:50051}"
SLIME_DIR="${SLIME_DIR:-/root/slime}"
MEGATRON_DIR="${MEGATRON_DIR:-/root/Megatron-LM}"
MODELS_DIR="${MODELS_DIR:-/root/models}"
RAY_ADDRESS="${RAY_ADDRESS:-http://127.0.0.1:8265}"
DRY_RUN=0

# run WORD...: run a command, or print it so that a shell reads it as the same words.
run() {
   if ((DRY_RUN)); then
      printf '%q ' "$@"
      echo
   else
      "$@"
   fi
}

# begin RECIPE SMOKE_TASK ARGUMENT...: read the arguments, write the configuration, and be done if the stage is smoke-env.
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
   # Absolute, for a job of Ray's runs elsewhere.
   RUN_DIR="$(realpath -m -- "${RUN_DIR:-out/${RECIPE}-${STAGE}}")"
   CONFIG="${RUN_DIR}/config.yaml"
   if [[ "$STAGE" == smoke-env ]]; then
      run "$PYTHON" -m trainer play "$SMOKE_TASK" --by null --envd "$ENVD_TARGET" --out "$RUN_DIR"
      exit 0
   fi
   if ((DRY_RUN)); then
      # The configuration is checked all the same: a wrong key is found here, and not by the first rollout.
      "$PYTHON" -m trainer recipe config "$RECIPE" --stage "$STAGE" --envd "$ENVD_TARGET" >/dev/null
   else
      mkdir -p "$RUN_DIR"
      "$PYTHON" -m trainer recipe config "$RECIPE" --stage "$STAGE" --envd "$ENVD_TARGET" >"$CONFIG"
   fi
}

# make_tasks: write the data set, unless there is one. What is held out is beside it.
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

# load_model SCRIPT: slime's MODEL_ARGS of a model. Where slime is not there, a dry run shows the script instead.
load_model() {
   if [[ -f "${SLIME_DIR}/scripts/models/$1" ]]; then
      source "${SLIME_DIR}/scripts/models/$1"
   elif ((DRY_RUN)); then
      MODEL_ARGS=(--spec "MODEL_ARGS of" "scripts/models/$1")
   else
      echo "there is no ${SLIME_DIR}/scripts/models/$1; set SLIME_DIR to slime's checkout" >&2
      exit 1
   fi
}

# Our hooks, the same in every recipe. The reward is made in generate, while the machine is there.
ENV_ARGS=(
   --input-key prompt
   --metadata-key metadata
   --apply-chat-template
   --custom-generate-function-path trainer.slime.generate.generate
   --custom-rm-path trainer.slime.rewards.reward_func
   --custom-reward-post-process-path trainer.slime.group.normalize_rewards
   --dynamic-sampling-filter-path trainer.slime.filters.keep_informative
   --custom-rollout-log-function-path trainer.slime.metrics.log_rollout
   --custom-eval-rollout-log-function-path trainer.slime.metrics.log_evaluation
)

# submit SCRIPT ARGUMENT...: give slime's SCRIPT to Ray, which is started on this node if none answers. Nothing that
# runs already is ended.
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
