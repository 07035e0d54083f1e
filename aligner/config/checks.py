"""Checks that involve more than one key."""

import os

from aligner.config.batches import (
    check_shares,
    check_token_budgets,
    multiples_near,
    token_budgets,
)
from aligner.config.cluster import check_cluster
from aligner.config.credit import check_credit
from aligner.config.data import PromptSourceConfig
from aligner.config.generation import check_generation
from aligner.config.model import CriticConfig, ModelConfig
from aligner.config.policy import check_policy_backend
from aligner.config.run import BaseRunConfig, RunConfig, SFTRunConfig
from aligner.config.trainer import parse_duration
from aligner.errors import ConfigError


def check_config(config: BaseRunConfig) -> None:
    """Refuse combinations that cannot work, before anything is loaded."""
    if isinstance(config, SFTRunConfig):
        _check_supervised(config)
    if isinstance(config, RunConfig):
        _check_ppo(config)


def _check_supervised(config: SFTRunConfig) -> None:
    model = config.model
    check_policy_backend(config.policy.backend, model)
    check_token_budgets(model)
    check_longest_example(config, config.data.max_length or 1)
    if model.token_budgets is None:
        ranks = max(1, model.parallel.data_size(config.trainer.world_size))
        check_shares("model", model.global_batch_size, model.micro_batch_size, ranks)
    _check_data(config)
    _check_max_time(config)


def check_longest_example(config: SFTRunConfig, longest: int) -> None:
    """Refuse a token budget that the longest example exceeds."""
    for key, tokens in token_budgets(config.model).items():
        if tokens < longest:
            raise ConfigError(
                f"{key}={tokens}: an example may have {longest} tokens; raise it to at least "
                f"that, or lower data.max_length"
            )


def _check_ppo(config: RunConfig) -> None:
    check_policy_backend(config.policy.backend, config.model)
    check_cluster(config)
    check_generation(config)
    check_credit(config)
    _check_lengths(config)
    check_token_budgets(config.model)
    check_longest_sequence(config, config.data.max_prompt_length or 1)
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
    for role, batch in _trained(config).items():
        check_shares(role, batch.global_batch_size, batch.micro_batch_size, sizes[role])


def _trained(config: RunConfig) -> dict[str, ModelConfig | CriticConfig]:
    """The sections of the roles that are trained."""
    critic = {} if config.critic is None else {"critic": config.critic}
    return {"model": config.model, **critic}


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
    for key, tokens in token_budgets(config.model).items():
        if tokens < longest:
            raise ConfigError(
                f"{key}={tokens}: a prompt of {longest_prompt} tokens and "
                "model.ppo.length_params.max_length="
                f"{config.model.ppo.length_params.max_length} more do not fit; raise it to at "
                f"least {longest}"
            )


def _check_batches(config: RunConfig) -> None:
    samples = config.model.ppo.num_rollout_samples
    key = f"model.ppo.num_rollout_samples={samples}"
    per_prompt = config.model.ppo.num_rollouts_per_prompt
    if samples % per_prompt:
        raise ConfigError(
            f"{key} is not a multiple of model.ppo.num_rollouts_per_prompt={per_prompt}; "
            f"nearest that work: {multiples_near(samples, per_prompt)}"
        )
    for role, batch in _trained(config).items():
        if samples % batch.global_batch_size:
            raise ConfigError(
                f"{key} is not a multiple of {role}.global_batch_size={batch.global_batch_size}; "
                f"nearest that work: {multiples_near(samples, batch.global_batch_size)}"
            )
    worlds = (config.trainer.world_size, config.value_world_size)
    policy_size, value_size = (config.model.parallel.data_size(world) for world in worlds)
    check_batch_layout(config, max(1, policy_size), max(1, value_size))


def _check_data(config: RunConfig | SFTRunConfig) -> None:
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


def _check_max_time(config: RunConfig | SFTRunConfig) -> None:
    if config.trainer.max_time is None:
        return
    try:
        parse_duration(config.trainer.max_time)
    except ValueError as error:
        raise ConfigError(
            f"trainer.max_time={config.trainer.max_time}: expected DD:HH:MM:SS, "
            "for example 00:04:00:00 for four hours"
        ) from error
