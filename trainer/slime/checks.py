"""Check slime's own arguments against our configuration: refuse what cannot work, warn of what works badly.

Missing arguments pass: slime's contract tests give only a few.
"""

import logging
from collections.abc import Iterator
from typing import Any

from trainer.config import ConfigError
from trainer.data.curriculum import ALL
from trainer.slime.config import SlimeConfig
from trainer.slime.play.groups import CENTRED

logger = logging.getLogger(__name__)
_NORMALIZER = "trainer.slime.hooks.normalize_rewards"
_CREDIT = "trainer.slime.hooks.advantages"
_FILTER = "trainer.slime.hooks.keep_informative"
_DATA_SOURCE = "trainer.slime.hooks.data_source"
_LOG = "trainer.slime.hooks.log_rollout"
_EVALUATION_LOG = "trainer.slime.hooks.log_evaluation"
#: For hooks of users.
_IS_VOID = "leave them out by trainer.slime.hooks.is_void, see docs/train.md, section Own hooks"


def check(args: Any, config: SlimeConfig) -> None:
    """Refuse arguments that cannot work; warn of others. Raises: ConfigError."""
    for problem in refusals(args, config):
        raise ConfigError(problem)
    for warning in warnings(args, config):
        logger.warning("[envd] %s", warning)


def refusals(args: Any, config: SlimeConfig) -> Iterator[str]:
    """Yield the reasons why the arguments cannot work."""
    if getattr(args, "partial_rollout", False):
        if config.agent.images_per_row:
            yield (
                "--partial-rollout: slime continues samples of one row, but envd.agent.images_per_row makes several;"
                " set it to 0, or remove the flag"
            )
        if config.group == "tree":
            yield "--partial-rollout: members of a tree cannot be continued; set envd.group to fork, or remove the flag"
    ranks = getattr(args, "context_parallel_size", 1) or 1
    if ranks > 1 and not config.agent.text_only:
        yield (
            f"--context-parallel-size {ranks}: screenshots are not split over context-parallel ranks; set it to 1, or"
            " train without screenshots (envd.agent.text_only)"
        )
    if config.workers and config.max_episodes:
        yield (
            f"envd.max_episodes is {config.max_episodes}, but each of envd.workers would count alone; set it to 0 and"
            " limit episodes by --sglang-server-concurrency"
        )
    if config.curriculum != ALL and getattr(args, "data_source_path", _DATA_SOURCE) != _DATA_SOURCE:
        yield f"envd.curriculum {config.curriculum}: set --data-source-path to {_DATA_SOURCE}, which applies it"
    if config.workers and config.replay:
        yield "envd.workers: successes of a worker do not reach the pool of envd.replay; remove one of the two"
    if config.replay:
        yield from _replay_refusals(args)
    yield from _credit_refusals(args, config)
    context_tokens = getattr(args, "rollout_max_context_len", None)
    if context_tokens and context_tokens < config.agent.context_tokens:
        yield (
            f"envd.agent.context_tokens is {config.agent.context_tokens}, but --rollout-max-context-len is"
            f" {context_tokens}; set both to the same value"
        )
    group_size = getattr(args, "n_samples_per_prompt", 1)
    if config.group == "fork" and 0 < config.max_episodes < group_size:
        yield (
            f"envd.max_episodes is {config.max_episodes}, but a group of {group_size} (--n-samples-per-prompt) opens"
            " all its episodes together; raise it, or set envd.group to off"
        )
    if config.agent.images_per_row and getattr(args, "log_passrate", False):
        yield (
            "--log-passrate: slime computes pass rates over rows, and envd.agent.images_per_row makes several rows per"
            " episode; remove the flag (envd/success_frac is the pass rate), or set images_per_row to 0"
        )
    unit = row_unit(args)
    if config.agent.images_per_row and unit and config.pad_rows_to % unit:
        yield (
            f"envd.agent.images_per_row makes several rows per rollout, but static micro-batches need a multiple of"
            f" {unit} rows (data parallel size x --micro-batch-size); set envd.pad_rows_to to {unit}, or use"
            " --use-dynamic-batch-size"
        )


def _credit_refusals(args: Any, config: SlimeConfig) -> Iterator[str]:
    by_token = getattr(args, "custom_advantage_function_path", None) == _CREDIT
    if config.credit != "siblings":
        if by_token:
            yield f"--custom-advantage-function-path {_CREDIT}: set envd.credit to siblings, or remove the flag"
        return
    if not by_token:
        yield f"envd.credit siblings: add --custom-advantage-function-path {_CREDIT}"
    if getattr(args, "custom_reward_post_process_path", _NORMALIZER) != _NORMALIZER:
        yield f"envd.credit siblings: set --custom-reward-post-process-path to {_NORMALIZER}"
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in CENTRED or not getattr(args, "rewards_normalization", True):
        yield (
            f"envd.credit siblings: needs an estimator of {', '.join(CENTRED)} with normalised rewards, but"
            f" --advantage-estimator is {estimator}"
        )


def _replay_refusals(args: Any) -> Iterator[str]:
    converter = getattr(args, "custom_convert_samples_to_train_data_path", None)
    if getattr(args, "custom_reward_post_process_path", _NORMALIZER) != _NORMALIZER or converter:
        yield (
            f"envd.replay: replayed samples get their screenshots from {_NORMALIZER}; set"
            " --custom-reward-post-process-path to it, and no --custom-convert-samples-to-train-data-path"
        )
    if getattr(args, "use_rollout_routing_replay", False) or getattr(args, "rollout_top_p", 1.0) != 1.0:
        yield (
            "envd.replay: it stores tokens, log-probabilities and screenshots, but no routed experts and no top-p sets;"
            " remove --use-rollout-routing-replay and set --rollout-top-p to 1"
        )
    if not (getattr(args, "use_tis", True) or getattr(args, "use_rollout_logprobs", False)):
        yield (
            "envd.replay: replayed samples are off-policy and need importance weights; add --use-tis or"
            " --use-rollout-logprobs"
        )


def warnings(args: Any, config: SlimeConfig) -> Iterator[str]:
    """Yield the problems of arguments that work, but badly."""
    if config.replay and getattr(args, "data_source_path", _DATA_SOURCE) != _DATA_SOURCE:
        yield f"--data-source-path is not {_DATA_SOURCE}: the replay pool is lost when the job ends"
    if getattr(args, "partial_rollout", False) and getattr(args, "data_source_path", _DATA_SOURCE) != _DATA_SOURCE:
        yield f"--data-source-path is not {_DATA_SOURCE}: aborted samples are lost when the job ends"
    yield from _hook_warnings(args)
    filter_path = getattr(args, "dynamic_sampling_filter_path", _FILTER)
    # Without a filter, the normaliser replays successes to members of one row.
    if config.replay and filter_path != _FILTER and (filter_path or config.agent.images_per_row):
        yield f"--dynamic-sampling-filter-path is not {_FILTER}: nothing is ever replayed"
    reply_tokens = getattr(args, "rollout_max_response_len", None)
    if reply_tokens and reply_tokens < config.agent.reply_tokens:
        yield (
            f"--rollout-max-response-len is {reply_tokens} and limits each reply; envd.agent.reply_tokens,"
            f" {config.agent.reply_tokens}, is never reached"
        )


def _hook_warnings(args: Any) -> Iterator[str]:
    """Yield what hooks other than ours do with void samples, whose reward is 0."""
    if getattr(args, "custom_reward_post_process_path", _NORMALIZER) != _NORMALIZER:
        yield (
            f"--custom-reward-post-process-path is not {_NORMALIZER}: rewards of void samples may enter their group's"
            f" mean ({_IS_VOID}), and slime's own normalises a batch of unexpected size as one group"
        )
    if getattr(args, "dynamic_sampling_filter_path", _FILTER) not in (_FILTER, None):
        yield (
            f"--dynamic-sampling-filter-path is not {_FILTER}: void samples may count as failures, so that it keeps"
            f" groups without a signal and drops others ({_IS_VOID})"
        )
    if getattr(args, "custom_rollout_log_function_path", _LOG) != _LOG:
        yield (
            f"--custom-rollout-log-function-path is not {_LOG}: no envd/* metrics are logged, and envd.halt is checked"
            " within rollouts only"
        )
    has_evaluation = getattr(args, "eval_datasets", None) or getattr(args, "eval_prompt_data", None)
    if has_evaluation and getattr(args, "custom_eval_rollout_log_function_path", _EVALUATION_LOG) != _EVALUATION_LOG:
        yield (
            f"--custom-eval-rollout-log-function-path is not {_EVALUATION_LOG}: void samples lower eval/NAME as if they"
            f" had failed ({_IS_VOID}), and no eval/NAME/envd/* are logged"
        )


def row_unit(args: Any) -> int:
    """Return the number that must divide the rows of a step; 0 if any number of rows works or args do not say."""
    if getattr(args, "use_dynamic_batch_size", False):
        return 0
    try:
        gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
        model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
        return int(gpus // model * args.micro_batch_size)
    except (AttributeError, TypeError):
        return 0
