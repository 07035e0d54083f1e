"""Conversion of NeMo-RL's `PolicyConfig` and `ValueConfig` to sections of this library.

`nemo_rl_values` decides whether keys that this library lacks are ignored or refused. The section of
the disabled backend is ignored.
"""

import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import StrictBool, StrictStr
from typing_extensions import TypedDict

from aligner.config.fields import Count, ModelPath, Natural, NonNegative
from aligner.config.parse import build, type_below
from aligner.config.roles.model import LAYOUT_KEYS, STAGE_KEYS, CriticConfig, ModelConfig
from aligner.config.roles.optim import OptimConfig
from aligner.config.translation.nemo_rl_values import Notes, judge, torch_schedule
from aligner.errors import ConfigError
from aligner.foreign_keys import IGNORED, table

Section = Mapping[str, Any]
Backend = Literal["megatron", "dtensor"]


class ValueConfig(TypedDict, total=False):
    """NeMo-RL's settings of a value model. `KEYS` lists the keys in its sections."""

    model_name: ModelPath
    tokenizer: Section
    train_global_batch_size: Count
    train_micro_batch_size: Count
    logprob_batch_size: Count
    precision: StrictStr
    max_grad_norm: NonNegative | None
    megatron_cfg: Section
    dtensor_cfg: Section
    dynamic_batching: Section
    sequence_packing: Section
    optimizer: Section | None
    reward_model_cfg: Section


class PolicyConfig(ValueConfig, total=False):
    """NeMo-RL's settings of a policy."""

    generation: Section | None
    generation_batch_size: Count


# NeMo-RL's dotted key → one or several keys of `PublishedRole`. The first sets the value's type. If
# a row has a type instead of a key, `read_role` validates the value and may use it.
KEYS: dict[str, Any] = {
    "model_name": "model.restore_from_path",
    "tokenizer.name": StrictStr,  # the tokenizer is passed as an argument
    "precision": "precision",
    "max_grad_norm": "gradient_clip_val",
    "train_micro_batch_size": "model.micro_batch_size critic.micro_batch_size",
    "train_global_batch_size": "model.global_batch_size critic.global_batch_size",
    "logprob_batch_size": "model.ppo.forward_micro_batch_size critic.forward_micro_batch_size",
    **{
        f"{section}.{key}": f"model.{section}.{key}"
        for section, keys in {
            "dynamic_batching": "enabled train_mb_tokens logprob_mb_tokens sequence_length_round",
            "sequence_packing": "enabled train_mb_tokens logprob_mb_tokens algorithm",
        }.items()
        for key in keys.split()
    },
}
_OF_POLICIES: dict[str, Any] = {
    "generation_batch_size": "model.ppo.rollout_micro_batch_size",
    "generation.max_new_tokens": "model.ppo.length_params.max_length",
    "generation.temperature": "model.ppo.sampling_params.temperature",
    "generation.top_p": "model.ppo.sampling_params.top_p",
    "generation.top_k": "model.ppo.sampling_params.top_k",
    "generation.stop_strings": "model.ppo.sampling_params.end_strings",
    "generation.stop_token_ids": "stop_token_ids",
    "generation.pad_token_id": "pad_token_id",
}
_OF_VALUES = {"reward_model_cfg.enabled": StrictBool, "reward_model_cfg.reward_model_type": Any}
_OF_BACKENDS: dict[Backend, dict[str, Any]] = {
    "megatron": {
        "megatron_cfg.enabled": StrictBool,
        "megatron_cfg.env_vars": "env_vars",
        **{
            f"megatron_cfg.{key}": f"model.{key}"
            for key in (*LAYOUT_KEYS, *STAGE_KEYS, "freeze_moe_router")
        },
        "megatron_cfg.activation_checkpointing": StrictBool,
        "megatron_cfg.recompute_granularity": Literal["full", "selective"],
        "megatron_cfg.fp8_cfg.enabled": StrictBool,
        "megatron_cfg.fp8_cfg.fp8": "model.fp8",
        "megatron_cfg.optimizer.optimizer": "model.optim.name",
        "megatron_cfg.optimizer.lr": "model.optim.lr",
        "megatron_cfg.optimizer.min_lr": "model.optim.sched.min_lr",
        "megatron_cfg.optimizer.weight_decay": "model.optim.weight_decay",
        "megatron_cfg.optimizer.adam_beta1": "model.optim.betas.0",
        "megatron_cfg.optimizer.adam_beta2": "model.optim.betas.1",
        "megatron_cfg.optimizer.adam_eps": "model.optim.eps",
        "megatron_cfg.optimizer.clip_grad": "gradient_clip_val",
        "megatron_cfg.scheduler.lr_decay_style": "model.optim.sched.name",
        "megatron_cfg.scheduler.lr_decay_iters": "model.optim.sched.max_steps",
        "megatron_cfg.scheduler.lr_warmup_iters": "model.optim.sched.warmup_steps",
        "megatron_cfg.peft.enabled": "model.peft.peft_scheme",
        "megatron_cfg.peft.dim": "model.peft.lora_tuning.adapter_dim",
        "megatron_cfg.peft.alpha": "model.peft.lora_tuning.alpha",
        "megatron_cfg.peft.dropout": "model.peft.lora_tuning.adapter_dropout",
    },
    "dtensor": {
        "dtensor_cfg.enabled": StrictBool,
        "dtensor_cfg.env_vars": "env_vars",
        "dtensor_cfg.tensor_parallel_size": "model.tensor_model_parallel_size",
        "dtensor_cfg.activation_checkpointing": StrictBool,
        "optimizer.name": "model.optim.name",
        "optimizer.kwargs.lr": "model.optim.lr",
        "optimizer.kwargs.weight_decay": "model.optim.weight_decay",
        "optimizer.kwargs.betas": "model.optim.betas",
        "optimizer.kwargs.eps": "model.optim.eps",
    },
}
# Key → NeMo-RL's value (the last part of a dotted name, in lower case) → value here.
_VALUES: dict[str, dict[str, str]] = {
    "precision": {
        **dict.fromkeys(("32", "float32", "fp32"), "32"),
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    },
    "optimizer.name": {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "sgd": "sgd"},
    "sequence_packing.algorithm": {"modified_ffd": "modified_first_fit_decreasing"},
    "megatron_cfg.peft.enabled": {"true": "lora"},
}
_CLOSED = ("precision", "optimizer.name")  # keys for which only values in `_VALUES` are accepted
_BETAS = {"0": 0.9, "1": 0.999}  # defaults if only one of the two is set


@dataclass(frozen=True)
class PublishedRole:
    """A policy or value model with NeMo-RL's settings, as configuration of this library."""

    model: ModelConfig
    backend: Backend = "megatron"
    critic: CriticConfig = field(default_factory=CriticConfig)
    precision: Literal["32", "bf16"] = "32"
    gradient_clip_val: NonNegative = 1.0
    env_vars: Mapping[str, str] = field(default_factory=dict)
    generates: bool = False  # whether NeMo-RL's settings have a section ``generation``
    pad_token_id: Natural | None = None  # padding of generated rows (None: the tokenizer's)
    stop_token_ids: tuple[Natural, ...] = ()
    ignored: tuple[str, ...] = field(default=(), compare=False)  # keys without effect here
    # Key, value and remedy of settings that are refused for mixtures of experts only.
    dense_only: tuple[tuple[str, Any, str], ...] = ()

    def check_experts(self, num_experts: int | None) -> None:
        """Raise `ConfigError` if the model has experts, which ``dense_only`` settings exclude."""
        if num_experts is not None and self.dense_only:
            raise ConfigError(
                f"the model has {num_experts} experts, for which these settings are not supported\n"
                f"{table([*self.dense_only])}"
            )


def published_role(values: Section, name: Literal["policy", "value"] = "policy") -> PublishedRole:
    """Convert NeMo-RL's settings of a policy or value model. See `PolicyConfig`, `ValueConfig`.

    Keys that only tune the implementation are ignored. A warning and the start-up report list them.
    Raises `ConfigError`, with a table of all unsupported keys and values, or if not exactly one
    backend is enabled.
    """
    role, notes = read_role(values, name)
    if role is None:
        raise ConfigError(f"{name}: these settings are not supported\n{table(notes.refused)}")
    if role.ignored:
        IGNORED.update(dict.fromkeys(role.ignored))
        warnings.warn(f"keys without effect here: {', '.join(role.ignored)}", stacklevel=3)
    return role


def read_role(
    values: Section, name: Literal["policy", "value"] = "policy"
) -> tuple[PublishedRole | None, Notes]:
    """Convert settings like `published_role`. If ``Notes.refused`` has keys, the role is None."""
    if isinstance(values, DictConfig):
        values = OmegaConf.to_container(values, resolve=True)  # type: ignore[assignment]
    notes, backend = Notes(name), _backend(values, name)
    if values.get("model_name") is None:
        notes.refuse("model_name", None, "a .nemo file or a Hugging Face directory or name")
    # Validate the values of all keys in the tables by the types of the fields that they set.
    ignored = {"dtensor_cfg", "optimizer"} if backend == "megatron" else {"megatron_cfg"}
    sections = {key: value for key, value in values.items() if key not in {*ignored, "scheduler"}}
    role_keys = _OF_POLICIES if name == "policy" else _OF_VALUES
    keys = {**KEYS, **role_keys, **_OF_BACKENDS[backend]}
    settings: dict[str, Any] = {}
    for path, value in _settings(sections, keys, notes):
        hint = keys[path]
        if isinstance(hint, str):
            names = hint.split()[0].split(".")
            steps = [int(step) if step.isdigit() else step for step in names]
            hint = functools.reduce(type_below, steps, PublishedRole)
        try:
            settings[path] = build(hint, _translated_value(path, value), f"{name}.{path}")
        except ConfigError as error:
            notes.refuse(path, value, str(error).removeprefix(f"{name}.{path}: "))

    # Compute settings that depend on several keys.
    tree = _nested(settings, keys)
    optim = tree["model"].setdefault("optim", {})
    if isinstance(optim.get("betas"), dict):
        optim["betas"] = tuple({**_BETAS, **optim["betas"]}.values())
    if backend == "dtensor" and values.get("scheduler") is not None:
        optim["sched"] = torch_schedule(values["scheduler"], optim.get("lr", OptimConfig.lr), notes)
    if settings.get(f"{backend}_cfg.activation_checkpointing"):
        granularity = settings.get("megatron_cfg.recompute_granularity", "full")
        tree["model"]["activations_checkpoint_granularity"] = granularity
    # Biases of experts are updated only if both of their keys are set. One alone has no effect.
    biases = [row for row in notes.experts if "_bias" in row[0]]
    if len(biases) == 1:
        notes.experts.remove(biases[0])
    if settings.get("megatron_cfg.expert_model_parallel_size", 1) > 1:
        notes.refused += notes.experts

    if notes.refused:
        return None, notes
    tree |= {"backend": backend, "generates": values.get("generation") is not None}
    role = build(PublishedRole, tree, name)
    return dataclasses.replace(
        role,
        critic=dataclasses.replace(role.critic, optim=role.model.optim),
        ignored=tuple(notes.ignored),
        dense_only=tuple(notes.experts),
    ), notes


def _backend(values: Section, name: str) -> Backend:
    megatron, dtensor = (
        bool((values.get(key) or {}).get("enabled", False))
        for key in ("megatron_cfg", "dtensor_cfg")
    )
    if megatron == dtensor:
        both = "both are" if megatron else "neither is"
        raise ConfigError(
            f"one of {name}.megatron_cfg.enabled and {name}.dtensor_cfg.enabled must be true, but "
            f"{both} true. Set exactly one of them to true"
        )
    return "megatron" if megatron else "dtensor"


def _settings(
    values: Section, keys: Mapping[str, Any], notes: Notes, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    known = [*{key[len(prefix) :].split(".")[0]: 0 for key in keys if key.startswith(prefix)}]
    for key, value in values.items():
        path = f"{prefix}{key}"
        if path in keys:
            if value is not None or path == "max_grad_norm":
                yield path, value
        elif key not in known:
            judge(path, value, known, notes)
        elif isinstance(value, Mapping):
            if f"{path}.enabled" not in keys or value.get("enabled"):
                yield from _settings(value, keys, notes, f"{path}.")
        elif value is not None:
            notes.refuse(path, value, "expected a group of keys")


def _translated_value(path: str, value: Any) -> Any:
    """Convert the value of NeMo-RL's key ``path``. Raises `ConfigError` if it is not supported."""
    if path.endswith(".env_vars") and isinstance(value, Mapping):
        return {variable: str(text) for variable, text in value.items()}
    if path in _VALUES:
        spellings = _VALUES[path]
        short = str(value).rsplit(".", 1)[-1].lower()
        if path in _CLOSED and short not in spellings:
            raise ConfigError(f"use one of {', '.join(spellings)}")
        return spellings.get(short, value)
    if path == "max_grad_norm" and value is None:
        return 0.0
    return 0 if path == "generation.top_k" and value == -1 else value


def _nested(settings: Section, keys: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {}}
    for path, targets in keys.items():
        if path not in settings or not isinstance(targets, str):
            continue
        for *steps, last in (target.split(".") for target in targets.split()):
            section = tree
            for step in steps:
                section = section.setdefault(step, {})
            section.setdefault(last, settings[path])
    return tree
