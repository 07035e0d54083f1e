"""Checks of the source of rewards against the rest of a run."""

from aligner.config.reward import RewardModelConfig, RewardServerConfig
from aligner.config.run import SamplingRunConfig
from aligner.errors import ConfigError


def check_reward(config: SamplingRunConfig) -> None:
    """Refuse a kind of reward without its section, and sections that nobody reads."""
    reward = config.reward
    if reward.kind != "environment" and getattr(reward, reward.kind) is None:
        example = {
            "function": "reward.function=my_rewards.py:reward",
            "model": "reward=model reward.model.restore_from_path=REWARD.nemo",
            "server": "reward=server reward.server.url=http://host:5555",
        }[reward.kind]
        raise ConfigError(
            f"reward.kind={reward.kind} needs reward.{reward.kind}; give it, for example {example}"
        )
    for other in ("model", "server"):
        if other != reward.kind and getattr(reward, other) is not None:
            raise ConfigError(
                f"reward.{other} is given, and reward.kind={reward.kind} does not read it; set "
                f"reward.kind={other}, or reward.{other}=null"
            )
    if reward.attribute_weights is not None and reward.kind not in ("model", "server"):
        raise ConfigError(
            "reward.attribute_weights weighs what a reward model or a server rates, and "
            f"reward.kind={reward.kind}; set it to null"
        )
    if reward.model is not None:
        _check_workers(config, reward.model)
        if reward.model.share_body_with_critic:
            _check_shared_backbone(config, reward.model)
    if reward.server is not None:
        _check_waits(config, reward.server)


def _check_workers(config: SamplingRunConfig, model: RewardModelConfig) -> None:
    if model.workers is None:
        return
    if config.cluster.engine != "ray":
        raise ConfigError(
            f"reward.model.workers={model.workers} needs cluster.engine=ray; set it, or leave "
            "reward.model.workers at null"
        )
    size = config.model.parallel.model_parallel_size
    if model.workers % size:
        raise ConfigError(
            f"reward.model.workers={model.workers} is not a multiple of tensor x pipeline x "
            f"context = {size}, the layout that the reward model shares with the policy; use "
            f"{-(-model.workers // size) * size}"
        )


def _check_shared_backbone(config: SamplingRunConfig, model: RewardModelConfig) -> None:
    """Refuse to share a body that is not there, or that holds more than one model's weights."""
    key = "reward.model.share_body_with_critic=true"
    if getattr(config, "critic", None) is None:
        raise ConfigError(f"{key}, but this run has no critic; set it to false")
    if config.value_parallel != config.model.parallel:
        raise ConfigError(
            f"{key}: a reward model has the policy's layout, and this critic one of its own; leave "
            "the critic's sizes at null, or set share_body_with_critic to false"
        )
    if config.policy.backend != "megatron":
        raise ConfigError(
            f"{key} swaps weights of megatron-core models, and policy.backend="
            f"{config.policy.backend}; set one of them to false or megatron"
        )
    if config.model.peft.lora is not None:
        raise ConfigError(
            f"{key}, but with model.peft.peft_scheme=lora the critic is adapters beside frozen "
            "weights; set one of them to false or null"
        )
    for name in ("workers", "offload_weights"):
        value = getattr(model, name)
        if value:
            raise ConfigError(
                f"{key} has the reward model score on the critic's workers, and reward.model."
                f"{name}={str(value).lower()} is for workers of its own; set one of them to "
                f"{'null' if name == 'workers' else 'false'}"
            )


def _check_waits(config: SamplingRunConfig, server: RewardServerConfig) -> None:
    if server.token_env is not None and server.token_file is not None:
        raise ConfigError(
            "reward.server.token_env and reward.server.token_file are both given; set one to null"
        )
    longest = server.retry_for_s + server.timeout_s
    if config.cluster.engine == "local" and longest >= config.cluster.timeout_s:
        raise ConfigError(
            f"reward.server.retry_for_s={server.retry_for_s:g} and timeout_s="
            f"{server.timeout_s:g} together must stay below cluster.timeout_s="
            f"{config.cluster.timeout_s:g}, for which the other processes wait; lower them, or "
            "raise it"
        )
