"""Checks that involve more than one key."""

import math
import os

from aligner.config.cluster import check_cluster
from aligner.config.data import PromptSourceConfig
from aligner.config.generation import check_generation
from aligner.config.run import RunConfig
from aligner.config.trainer import parse_duration
from aligner.errors import ConfigError


def check_config(config: RunConfig) -> None:
    """Refuse combinations that cannot work, before anything is loaded."""
    _check_not_in_this_version(config)
    check_cluster(config)
    check_generation(config)
    _check_lengths(config)
    _check_token_budgets(config)
    _check_batches(config)
    _check_data(config)
    _check_max_time(config)


def check_batch_layout(config: RunConfig, policy_size: int, value_size: int) -> None:
    """Refuse batch sizes that the data-parallel ranks of a role cannot share evenly.

    Token budgets level tokens instead: any number of sequences will do.
    """
    if config.model.token_budgets is not None:
        return
    sizes = {"model": policy_size, "critic": value_size}
    for role, batch in (("model", config.model), ("critic", config.critic)):
        data_parallel_size = sizes[role]
        per_pass = batch.micro_batch_size * data_parallel_size
        if batch.global_batch_size % per_pass:
            raise ConfigError(
                f"{role}.global_batch_size={batch.global_batch_size} is not a multiple of "
                f"{role}.micro_batch_size={batch.micro_batch_size} x {data_parallel_size} "
                f"data-parallel ranks = {per_pass}; nearest that work: "
                f"{_multiples(batch.global_batch_size, per_pass)}"
            )


def _check_not_in_this_version(config: RunConfig) -> None:
    wanted = {
        "policy.backend": (config.policy.backend, "megatron"),
    }
    for key, (value, supported) in wanted.items():
        if value != supported:
            raise ConfigError(f"{key}={value}: not in this version; use {key}={supported}")


def _check_lengths(config: RunConfig) -> None:
    lengths = config.model.ppo.length_params
    key = "model.ppo.length_params"
    if lengths.min_length > lengths.max_length:
        raise ConfigError(
            f"{key}.min_length={lengths.min_length} is more than "
            f"{key}.max_length={lengths.max_length}; lower the one or raise the other"
        )


def check_longest_sequence(config: RunConfig, longest_prompt: int) -> None:
    """Refuse a token budget that the longest possible sequence exceeds."""
    longest = longest_prompt + config.model.ppo.length_params.max_length
    for key, tokens in _token_budgets(config).items():
        if tokens < longest:
            raise ConfigError(
                f"{key}={tokens}: a prompt of {longest_prompt} tokens and "
                "model.ppo.length_params.max_length="
                f"{config.model.ppo.length_params.max_length} more do not fit; raise it to at "
                f"least {longest}"
            )


def _check_token_budgets(config: RunConfig) -> None:
    model = config.model
    if model.sequence_packing.enabled and model.dynamic_batching.enabled:
        raise ConfigError(
            "model.sequence_packing.enabled=true and model.dynamic_batching.enabled=true exclude "
            "each other; set one of them to false (packing wastes less)"
        )
    parallel = model.parallel
    multiple = math.lcm(
        parallel.sequence_multiple,
        parallel.context * parallel.row_multiple(model.sequence_length_round),
    )
    for key, tokens in _token_budgets(config).items():
        if tokens % multiple:
            raise ConfigError(
                f"{key}={tokens} does not divide by {multiple}, which "
                f"model.context_parallel_size={parallel.context}, "
                f"model.tensor_model_parallel_size={parallel.tensor} with "
                f"model.sequence_parallel={str(parallel.sequence_parallel).lower()} and lengths "
                f"in multiples of {model.sequence_length_round} need; nearest that work: "
                f"{_multiples(tokens, multiple)}"
            )
    check_longest_sequence(config, config.data.max_prompt_length or 1)


def _token_budgets(config: RunConfig) -> dict[str, int]:
    """The token budgets in force, by key."""
    model = config.model
    name = "sequence_packing" if model.sequence_packing.enabled else "dynamic_batching"
    budgets = model.token_budgets
    if budgets is None:
        return {}
    found = {"train_mb_tokens": budgets.train_mb_tokens}
    if budgets.logprob_mb_tokens is not None:
        found["logprob_mb_tokens"] = budgets.logprob_mb_tokens
    return {f"model.{name}.{key}": tokens for key, tokens in found.items()}


def _check_batches(config: RunConfig) -> None:
    samples = config.model.ppo.num_rollout_samples
    key = f"model.ppo.num_rollout_samples={samples}"
    per_prompt = config.model.ppo.num_rollouts_per_prompt
    if samples % per_prompt:
        raise ConfigError(
            f"{key} is not a multiple of model.ppo.num_rollouts_per_prompt={per_prompt}; "
            f"nearest that work: {_multiples(samples, per_prompt)}"
        )
    for role, batch in (("model", config.model), ("critic", config.critic)):
        if samples % batch.global_batch_size:
            raise ConfigError(
                f"{key} is not a multiple of {role}.global_batch_size={batch.global_batch_size}; "
                f"nearest that work: {_multiples(samples, batch.global_batch_size)}"
            )
    worlds = (config.trainer.world_size, config.value_world_size)
    policy_size, value_size = (config.model.parallel.data_size(world) for world in worlds)
    check_batch_layout(config, max(1, policy_size), max(1, value_size))


def _check_data(config: RunConfig) -> None:
    _check_source("data.train", config.data.train)
    if config.data.validation is not None:
        _check_source("data.validation", config.data.validation)
    if not config.model.restore_from_path:
        raise ConfigError("model.restore_from_path: empty; give the path of a .nemo file")
    path = config.exp_manager.explicit_log_dir
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(f"exp_manager.explicit_log_dir={path}: is a file; give a directory")


def _check_source(key: str, source: PromptSourceConfig) -> None:
    if not source.source:
        raise ConfigError(
            f"{key}.source: empty; give a .jsonl or .parquet file or a generator function "
            "(package.module:function)"
        )


def _check_max_time(config: RunConfig) -> None:
    if config.trainer.max_time is None:
        return
    try:
        parse_duration(config.trainer.max_time)
    except ValueError as error:
        raise ConfigError(
            f"trainer.max_time={config.trainer.max_time}: expected DD:HH:MM:SS, "
            "for example 00:04:00:00 for four hours"
        ) from error


def _multiples(near: int, step: int) -> str:
    below, above = near // step * step, -(-near // step) * step
    return f"{below} or {above}" if below else str(above)
