"""Checks that involve more than one key."""

import os
from collections.abc import Mapping

from aligner.config.algorithms.trainer import parse_duration
from aligner.config.commands.ask import AskConfig, check_ask
from aligner.config.roles.model import CriticConfig, ModelConfig, TrainedModelConfig
from aligner.config.roles.policy import check_policy_backend
from aligner.config.rules.batches import (
    check_rows_together,
    check_shares,
    check_token_budgets,
    length_multiple,
    multiples_near,
    token_budgets,
)
from aligner.config.rules.cluster import check_cluster
from aligner.config.rules.correction import check_correction, check_recorded
from aligner.config.rules.credit import check_credit
from aligner.config.rules.environment import check_environment
from aligner.config.rules.examples import check_distill, check_preference, check_reward_model
from aligner.config.rules.generation import check_generation
from aligner.config.rules.reward import check_reward
from aligner.config.rules.unused import check_unused
from aligner.config.run import (
    BaseRunConfig,
    DistillRunConfig,
    DPORunConfig,
    RewardRunConfig,
    RSRunConfig,
    RunConfig,
    SamplingRunConfig,
    SupervisedRunConfig,
)
from aligner.config.validation import check_samples_differ, check_sets
from aligner.errors import ConfigError


def check_config(config: BaseRunConfig | AskConfig) -> None:
    """Refuse combinations that cannot work, before anything is loaded."""
    if isinstance(config, AskConfig):
        check_ask(config)
    if isinstance(config, DPORunConfig):
        check_preference(config)
    if isinstance(config, RewardRunConfig):
        check_reward_model(config)
    if isinstance(config, DistillRunConfig):
        check_distill(config)
        _check_lengths(config.model)
    if isinstance(config, SupervisedRunConfig):
        _check_supervised(config)
    if isinstance(config, SamplingRunConfig):
        _check_sampling(config)
    if isinstance(config, RunConfig):
        check_credit(config)
        check_correction(config)
        check_recorded(config)
        _check_batches(config)
    if isinstance(config, RSRunConfig):
        _check_kept(config)
    if isinstance(config, BaseRunConfig):
        _check_resume_changed(config)
        check_unused(config)


def _check_resume_changed(config: BaseRunConfig) -> None:
    """Refuse a key of ``exp_manager.resume_changed`` that is none of the configuration's."""
    for key in config.exp_manager.resume_changed:
        section: object = config
        for name in key.split("."):
            if section is None or isinstance(section, Mapping):
                break
            if not hasattr(section, name):
                raise ConfigError(
                    f"exp_manager.resume_changed: {key!r} is no key of the configuration; give the "
                    "keys that the refusal names, or sections such as trainer.ppo.reward"
                )
            section = getattr(section, name)


def _check_supervised(config: SupervisedRunConfig) -> None:
    model = config.model
    check_policy_backend(config.policy.backend, model)
    check_cluster(config)
    check_rows_together(model, config.rows_per_example)
    check_token_budgets(model)
    check_longest_example(config, config.data.max_length or 1)
    check_model_shares(config, config.trainer.world_size)
    _check_folder(config)
    _check_max_time(config)


def check_model_shares(config: BaseRunConfig, world_size: int) -> None:
    """Refuse a global batch that ``world_size`` processes cannot share evenly.

    Token budgets level tokens instead: any number of sequences will do.
    """
    model = config.model
    if model.token_budgets is None:
        ranks = max(1, model.parallel.data_size(world_size))
        check_shares("model", model.global_batch_size, model.micro_batch_size, ranks)


def check_longest_example(config: SupervisedRunConfig, longest: int) -> None:
    """Refuse a token budget that the longest example exceeds; ``longest`` is that of a row."""
    multiple = length_multiple(config.model)
    for key, tokens in token_budgets(config.model).items():
        rows = config.rows_per_example if key.endswith("train_mb_tokens") else 1
        needed = rows * -(-longest // multiple) * multiple
        if tokens < needed:
            example = f"an example may have {longest} tokens"
            if rows > 1:
                example = f"the {rows} rows of an example may have {longest} tokens each"
            raise ConfigError(
                f"{key}={tokens}: {example}; raise it to at least {needed}, or lower "
                "data.max_length"
            )


def _check_sampling(config: SamplingRunConfig) -> None:
    check_policy_backend(config.policy.backend, config.model)
    check_cluster(config)
    check_generation(config)
    check_reward(config)
    check_environment(config)
    _check_validation(config)
    _check_lengths(config.model)
    check_token_budgets(config.model)
    check_longest_sequence(config, config.data.max_prompt_length or 1)
    _check_samples(config)
    _check_folder(config)
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


def _check_lengths(model: TrainedModelConfig) -> None:
    lengths = model.rollout.length_params
    key = f"{model.rollout_key}.length_params"
    if lengths.min_length > lengths.max_length:
        raise ConfigError(
            f"{key}.min_length={lengths.min_length} is more than "
            f"{key}.max_length={lengths.max_length}; lower the one or raise the other"
        )


def _check_validation(config: SamplingRunConfig) -> None:
    validation, rollout = config.validation, config.model.rollout
    check_sets("validation.sets", validation.sets)
    sampling_options = validation.sampling_options(rollout)
    sampling = rollout.sampling_params if sampling_options is None else sampling_options.sampling
    check_samples_differ("validation", validation.samples_per_prompt, sampling.use_greedy)


def check_longest_sequence(config: SamplingRunConfig, longest_prompt: int) -> None:
    """Refuse a token budget that the longest possible sequence exceeds."""
    response = config.model.rollout.length_params.max_length
    longest = longest_prompt + response
    for key, tokens in token_budgets(config.model).items():
        if tokens < longest:
            raise ConfigError(
                f"{key}={tokens}: a prompt of {longest_prompt} tokens and "
                f"{config.model.rollout_key}.length_params.max_length={response} more do not fit; "
                f"raise it to at least {longest}"
            )


def _check_samples(config: SamplingRunConfig) -> None:
    rollout, section = config.model.rollout, config.model.rollout_key
    samples, per_prompt = rollout.num_rollout_samples, rollout.num_rollouts_per_prompt
    if samples % per_prompt:
        raise ConfigError(
            f"{section}.num_rollout_samples={samples} is not a multiple of "
            f"{section}.num_rollouts_per_prompt={per_prompt}; nearest that work: "
            f"{multiples_near(samples, per_prompt)}"
        )


def _check_kept(config: RSRunConfig) -> None:
    model, rs = config.model, config.model.rs
    if rs.top_n_rollouts > rs.num_rollouts_per_prompt:
        raise ConfigError(
            f"model.rs.top_n_rollouts={rs.top_n_rollouts} is more than "
            f"model.rs.num_rollouts_per_prompt={rs.num_rollouts_per_prompt}; lower it"
        )
    kept = rs.num_rollout_samples // rs.num_rollouts_per_prompt * rs.top_n_rollouts
    if kept % model.global_batch_size:
        raise ConfigError(
            f"a step keeps {kept} responses (model.rs.num_rollout_samples="
            f"{rs.num_rollout_samples} / num_rollouts_per_prompt={rs.num_rollouts_per_prompt} x "
            f"top_n_rollouts={rs.top_n_rollouts}), which is not a multiple of "
            f"model.global_batch_size={model.global_batch_size}; nearest that work: "
            f"{multiples_near(kept, model.global_batch_size)}"
        )
    check_model_shares(config, config.trainer.world_size)


def _check_batches(config: RunConfig) -> None:
    samples = config.model.ppo.num_rollout_samples
    key = f"model.ppo.num_rollout_samples={samples}"
    for role, batch in _trained(config).items():
        if samples % batch.global_batch_size:
            raise ConfigError(
                f"{key} is not a multiple of {role}.global_batch_size={batch.global_batch_size}; "
                f"nearest that work: {multiples_near(samples, batch.global_batch_size)}"
            )
    worlds = (config.trainer.world_size, config.value_world_size)
    layouts = (config.model.parallel, config.value_parallel)
    policy_size, value_size = (
        max(1, layout.data_size(world)) for layout, world in zip(layouts, worlds, strict=True)
    )
    check_batch_layout(config, policy_size, value_size)
    if config.critic is not None and config.critic.own_layout:
        of_critic = config.critic.laid_out(config.model)
        check_policy_backend(config.policy.backend, of_critic, "critic")
        check_token_budgets(of_critic)


def _check_folder(config: SamplingRunConfig | SupervisedRunConfig) -> None:
    path = config.exp_manager.explicit_log_dir
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(f"exp_manager.explicit_log_dir={path}: is a file; give a directory")


def _check_max_time(config: BaseRunConfig) -> None:
    if config.trainer.max_time is None:
        return
    try:
        parse_duration(config.trainer.max_time)
    except ValueError as error:
        raise ConfigError(
            f"trainer.max_time={config.trainer.max_time}: expected DD:HH:MM:SS, "
            "minutes and seconds below 60, for example 00:04:00:00 for four hours"
        ) from error
