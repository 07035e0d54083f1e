"""Refusal of options that are set and that nothing reads in this run."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from aligner.config.defaults import defaults_of
from aligner.config.run import BaseRunConfig, RunConfig, SamplingRunConfig, SupervisedRunConfig
from aligner.errors import ConfigError


class _Option(NamedTuple):
    """Keys that are read only under a condition, and the sentence that states the condition."""

    kind: type[BaseRunConfig]
    keys: tuple[str, ...]  # a key, or a section with all its keys
    is_read: Callable[[Any], bool]
    condition: str


_OPTIONS = (
    _Option(
        SamplingRunConfig,
        (
            *("data.prompt_column", "data.tools_column", "data.chat", "data.system_prompt"),
            *("data.add_bos", "reward.kwargs", "reward.time_limit_s", "reward.timeout_reward"),
        ),
        lambda config: not config.environment.is_set,
        "is for runs without an environment; environment.kwargs gives arguments to the environment",
    ),
    _Option(
        SamplingRunConfig,
        (
            *("environment.kwargs", "environment.max_turns", "environment.max_tokens"),
            *("environment.timeout_s", "environment.total_timeout_s", "environment.concurrency"),
            *("environment.memory_mb", "environment.retries", "environment.rewritten_history"),
            *("environment.unscored", "environment.failed"),
        ),
        lambda config: config.environment.is_set,
        "needs an environment: set reward=environment and environment.factory",
    ),
    _Option(
        SamplingRunConfig,
        ("validation",),
        lambda config: config.data.validation is not None or bool(config.validation.sets),
        "needs validation data: set data.validation.source",
    ),
    _Option(
        SamplingRunConfig,
        ("generation.vllm",),
        lambda config: config.generation.backend == "vllm",
        "needs generation.backend=vllm",
    ),
    _Option(
        RunConfig,
        ("trainer.ppo.gae_lambda",),
        lambda config: (
            config.trainer.ppo.advantage.estimator == "gae" or config.trainer.ppo.advantage.is_own
        ),
        "needs trainer.ppo.advantage.estimator=gae",
    ),
    _Option(
        RunConfig,
        ("model.ppo.kl_loss.estimator",),
        lambda config: config.model.ppo.kl_loss.coef > 0,
        "needs model.ppo.kl_loss.coef above 0",
    ),
    _Option(
        RunConfig,
        ("trainer.ppo.improper_end.penalty",),
        lambda config: config.trainer.ppo.improper_end.mode == "penalize",
        "needs trainer.ppo.improper_end.mode=penalize",
    ),
    _Option(
        BaseRunConfig,
        ("model.peft.lora_tuning", "model.peft.restore_from_path"),
        lambda config: config.model.peft.lora is not None,
        "needs model.peft.peft_scheme=lora",
    ),
    _Option(
        SupervisedRunConfig,
        ("data.prompt_column", "data.response_column", "data.chat"),
        lambda config: getattr(config.data, "messages_column", None) is None,
        "is for rows of a prompt and a response, and data.messages_column names a whole chat",
    ),
)


def check_unused(config: BaseRunConfig) -> None:
    """Refuse options that are set and that nothing reads in this run.

    An option is set if its value is not its default.

    Raises:
        ConfigError: names every such key and its value, and the condition under which it is read.
    """
    values, defaults = dataclasses.asdict(config), defaults_of(config)
    unused = [
        f"{key}={_at(values, key)!r} {option.condition}"
        for option in _OPTIONS
        if isinstance(config, option.kind) and not option.is_read(config)
        for key in _set_keys(values, defaults, option.keys)
    ]
    if unused:
        raise ConfigError(f"{'; '.join(unused)}. Nothing reads it in this run; leave it out")


def _set_keys(
    values: Mapping[str, Any], defaults: Mapping[str, Any], keys: tuple[str, ...]
) -> list[str]:
    changed: list[str] = []
    for key in keys:
        value, default = _at(values, key), _at(defaults, key)
        if isinstance(value, Mapping) and isinstance(default, Mapping) and default:
            changed += _set_keys(values, defaults, tuple(f"{key}.{name}" for name in value))
        elif _plain(value) != _plain(default):
            changed.append(key)
    return changed


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _at(values: Mapping[str, Any], key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None  # type: ignore[assignment]
    return values
