"""Policies and critics described as in NeMo-RL: mappings of `PolicyConfig` and `ValueConfig`.

`published_role` turns one into this library's own sections. Keys without a counterpart are judged
by their values (`aligner.config.elsewhere.nemo_rl_values`); the section of the backend that is not
enabled is not read.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval
from omegaconf import DictConfig, OmegaConf
from pydantic import StrictBool, StrictFloat, StrictStr
from typing_extensions import TypedDict

from aligner.config.elsewhere.nemo_rl_values import (
    Notes,
    judge,
    read_section,
    table,
    torch_schedule,
)
from aligner.config.fields import (
    Count,
    Integer,
    ModelPath,
    Natural,
    NonNegative,
    Positive,
    aliases,
)
from aligner.config.parse import build
from aligner.config.roles.model import (
    CriticConfig,
    DynamicBatchingConfig,
    ModelConfig,
    PackingAlgorithmName,
    SequencePackingConfig,
)
from aligner.config.roles.optim import OptimConfig, SchedConfig
from aligner.config.roles.peft import LoraConfig, PeftConfig
from aligner.config.roles.sampling import LengthParams, PolicyPPOConfig, SamplingParams
from aligner.errors import ConfigError


class TokenizerSpec(TypedDict, total=False):
    """Tokenizer in a published mapping; the one that is given as an argument is used instead."""

    name: StrictStr


class MegatronOptimizerSpec(TypedDict, total=False):
    """The optimizer of ``megatron_cfg``."""

    optimizer: Literal["adam", "sgd"]
    lr: Positive
    min_lr: NonNegative
    weight_decay: NonNegative
    adam_beta1: StrictFloat
    adam_beta2: StrictFloat
    adam_eps: Positive
    clip_grad: NonNegative


class MegatronSchedulerSpec(TypedDict, total=False):
    """The schedule of ``megatron_cfg``, in optimizer steps."""

    lr_decay_style: Literal["constant", "cosine", "linear"]
    lr_decay_iters: Count | None
    lr_warmup_iters: Natural


class MegatronPeftSpec(TypedDict, total=False):
    """Adapters of ``megatron_cfg``, on all linear layers."""

    enabled: StrictBool
    dim: Count
    alpha: Positive
    dropout: Annotated[StrictFloat, Interval(ge=0, le=0.9)]


class MegatronSpec(TypedDict, total=False):
    """``megatron_cfg``: megatron-core's GPT."""

    enabled: StrictBool
    env_vars: Mapping[str, Any] | None
    tensor_model_parallel_size: Count
    pipeline_model_parallel_size: Count
    context_parallel_size: Count
    expert_model_parallel_size: Count
    sequence_parallel: StrictBool
    activation_checkpointing: StrictBool
    recompute_granularity: Literal["full", "selective"]
    optimizer: MegatronOptimizerSpec
    scheduler: MegatronSchedulerSpec
    peft: MegatronPeftSpec


class DTensorSpec(TypedDict, total=False):
    """``dtensor_cfg``: a transformers model, by FSDP2 and DTensor."""

    enabled: StrictBool
    env_vars: Mapping[str, Any] | None
    tensor_parallel_size: Count
    context_parallel_size: Count
    sequence_parallel: StrictBool
    activation_checkpointing: StrictBool


class DynamicBatchingSpec(TypedDict, total=False):
    """``dynamic_batching``."""

    enabled: StrictBool
    train_mb_tokens: Count
    logprob_mb_tokens: Count | None
    sequence_length_round: Count


class SequencePackingSpec(TypedDict, total=False):
    """``sequence_packing``."""

    enabled: StrictBool
    train_mb_tokens: Count
    logprob_mb_tokens: Count | None
    algorithm: Annotated[
        PackingAlgorithmName, aliases({"modified_ffd": "modified_first_fit_decreasing"})
    ]


class GenerationSpec(TypedDict, total=False):
    """``generation``, by the policy's own workers."""

    max_new_tokens: Count
    temperature: Positive
    top_p: Annotated[StrictFloat, Interval(gt=0, le=1)]
    top_k: Integer | None
    stop_strings: tuple[StrictStr, ...] | None
    stop_token_ids: tuple[Integer, ...] | None
    pad_token_id: Natural | None


class PytorchOptimizerSpec(TypedDict, total=False):
    """``optimizer`` of a policy on DTensors: a torch class by name, and its arguments."""

    name: StrictStr
    kwargs: Mapping[str, Any]


class RewardModelSpec(TypedDict, total=False):
    """``reward_model_cfg``: the head of a value model."""

    enabled: StrictBool
    reward_model_type: StrictStr


class ValueConfig(TypedDict, total=False):
    """A value model as NeMo-RL describes it."""

    model_name: ModelPath
    tokenizer: TokenizerSpec
    train_global_batch_size: Count
    train_micro_batch_size: Count
    logprob_batch_size: Count
    precision: StrictStr
    max_grad_norm: NonNegative | None
    megatron_cfg: MegatronSpec
    dtensor_cfg: DTensorSpec
    dynamic_batching: DynamicBatchingSpec
    sequence_packing: SequencePackingSpec
    optimizer: PytorchOptimizerSpec | None
    reward_model_cfg: RewardModelSpec


class PolicyConfig(ValueConfig, total=False):
    """A policy as NeMo-RL describes it."""

    generation: GenerationSpec | None
    generation_batch_size: Count


_PRECISIONS: dict[str, Literal["32", "bf16"]] = {
    "32": "32",
    "float32": "32",
    "fp32": "32",
    "bf16": "bf16",
    "bfloat16": "bf16",
}
_OPTIMIZERS: dict[str, Literal["adam", "sgd"]] = {
    "adam": "adam",
    "adamw": "adam",
    "fusedadam": "adam",
    "sgd": "sgd",
}


@dataclass(frozen=True)
class PublishedRole:
    """Settings of a published mapping, in the library's own sections."""

    backend: Literal["megatron", "dtensor"]
    model: ModelConfig
    critic: CriticConfig
    precision: Literal["32", "bf16"] = "32"
    gradient_clip_val: float = 1.0
    env_vars: Mapping[str, str] = field(default_factory=dict)
    generates: bool = False  # there is a section ``generation``
    pad_token_id: int | None = None  # of generated rows; None: the tokenizer's
    stop_token_ids: tuple[int, ...] = ()
    ignored: tuple[str, ...] = field(default=(), compare=False)  # keys that tune engines
    of_experts: tuple[tuple[str, Any, str], ...] = ()  # keys that only a dense model leaves neutral

    def check_experts(self, num_experts: int | None) -> None:
        """Refuse, of a mixture of experts, what is neutral where the model is dense."""
        if num_experts is not None and self.of_experts:
            raise ConfigError(f"the model has {num_experts} experts\n{table([*self.of_experts])}")


def published_role(
    values: Mapping[str, Any], name: Literal["policy", "value"] = "policy"
) -> PublishedRole:
    """Read a mapping of `PolicyConfig` (``name="policy"``) or `ValueConfig`.

    A missing key has the default of the section it becomes. ``context_parallel_size`` above
    1 needs ``megatron_cfg``.

    Raises:
        ConfigError: neither or both backends are enabled; a key is unknown, or has a value that
            cannot work. The message is a table of all such keys.
    """
    role, notes = read_role(values, name)
    notes.raise_refused()
    assert role is not None, "what is not refused is a role"
    if role.ignored:
        warnings.warn(f"without a counterpart here: {', '.join(role.ignored)}", stacklevel=3)
    return role


def read_role(
    values: Mapping[str, Any], name: Literal["policy", "value"] = "policy"
) -> tuple["PublishedRole | None", Notes]:
    """As `published_role`, without raising: None where the notes have anything refused."""
    if isinstance(values, DictConfig):
        values = OmegaConf.to_container(values, resolve=True)  # type: ignore[assignment]
    notes = Notes(name)
    backend = _backend(values, name)
    others = "dtensor_cfg" if backend == "megatron" else "megatron_cfg"
    unread = {others} if backend == "dtensor" else {others, "optimizer", "scheduler"}
    own = {key: value for key, value in values.items() if key not in unread}
    entries = own.pop("scheduler", None)
    schema: type[Any] = PolicyConfig if name == "policy" else ValueConfig
    given = read_section(own, schema, notes)
    section = given.get(f"{backend}_cfg", {})
    if given.get("model_name") is None and not any("model_name" in row[0] for row in notes.refused):
        notes.refuse("model_name", None, "a .nemo file or a Hugging Face directory or name")
    _check_features(given, section, backend, notes)
    optim, clip = _optimizer(given, section, notes)
    if entries is not None:
        optim = dataclasses.replace(optim, sched=torch_schedule(entries, optim.lr, notes))
    if section.get("expert_model_parallel_size", 1) > 1:
        notes.refused += notes.experts
    if notes.refused:
        return None, notes
    generation = given.get("generation") or {}
    model = _model(given, section, backend, optim)
    role = PublishedRole(
        backend=backend,
        model=model,
        critic=_only(
            CriticConfig,
            micro_batch_size=given.get("train_micro_batch_size"),
            global_batch_size=given.get("train_global_batch_size"),
            forward_micro_batch_size=given.get("logprob_batch_size"),
            optim=optim,
        ),
        precision=_PRECISIONS[given.get("precision", "32")],
        gradient_clip_val=clip,
        env_vars={key: str(value) for key, value in (section.get("env_vars") or {}).items()},
        generates=given.get("generation") is not None,
        pad_token_id=generation.get("pad_token_id"),
        stop_token_ids=tuple(generation.get("stop_token_ids") or ()),
        ignored=tuple(notes.ignored),
        of_experts=tuple(notes.experts),
    )
    return role, notes


def _backend(given: Mapping[str, Any], name: str) -> Literal["megatron", "dtensor"]:
    megatron, dtensor = (
        bool((given.get(key) or {}).get("enabled", False))
        for key in ("megatron_cfg", "dtensor_cfg")
    )
    if megatron == dtensor:
        both = "both" if megatron else "neither of them"
        raise ConfigError(
            f"{name}.megatron_cfg.enabled, {name}.dtensor_cfg.enabled: {both} true; set exactly "
            "one of them to true"
        )
    return "megatron" if megatron else "dtensor"


def _check_features(
    given: Mapping[str, Any], section: Mapping[str, Any], backend: str, notes: Notes
) -> None:
    """Refuse settings that are known and that this backend, or this role, does not have."""
    context = section.get("context_parallel_size", 1)
    if backend == "dtensor" and context > 1:
        notes.refuse(
            "dtensor_cfg.context_parallel_size",
            context,
            "1, or use megatron_cfg: DTensors have data and tensor parallelism alone",
        )
    if (given.get("reward_model_cfg") or {}).get("enabled") and notes.name == "policy":
        notes.refuse(
            "reward_model_cfg.enabled",
            True,
            "aligner.models.reward.reward_model.RewardModel: a policy has no reward head",
        )
    precision = given.get("precision", "32")
    if precision not in _PRECISIONS:
        notes.refuse("precision", precision, f"use one of {', '.join(_PRECISIONS)}")


def _model(
    given: Mapping[str, Any], section: Mapping[str, Any], backend: str, optim: OptimConfig
) -> ModelConfig:
    tensor = "tensor_model_parallel_size" if backend == "megatron" else "tensor_parallel_size"
    batching: dict[str, type[Any]] = {
        "dynamic_batching": DynamicBatchingConfig,
        "sequence_packing": SequencePackingConfig,
    }
    peft = section.get("peft", {})
    return _only(
        ModelConfig,
        restore_from_path=given["model_name"],
        micro_batch_size=given.get("train_micro_batch_size"),
        global_batch_size=given.get("train_global_batch_size"),
        tensor_model_parallel_size=section.get(tensor),
        pipeline_model_parallel_size=section.get("pipeline_model_parallel_size"),
        context_parallel_size=section.get("context_parallel_size"),
        expert_model_parallel_size=section.get("expert_model_parallel_size"),
        sequence_parallel=section.get("sequence_parallel"),
        activations_checkpoint_granularity=section.get("recompute_granularity", "full")
        if section.get("activation_checkpointing")
        else None,
        peft=PeftConfig("lora", lora_tuning=_lora(peft)) if peft.get("enabled") else None,
        optim=optim,
        ppo=_generation(given),
        **{key: config(**given[key]) for key, config in batching.items() if key in given},
    )


def _lora(peft: Mapping[str, Any]) -> LoraConfig:
    fields = {"adapter_dim": "dim", "alpha": "alpha", "adapter_dropout": "dropout"}
    values = {ours: peft[theirs] for ours, theirs in fields.items() if theirs in peft}
    return LoraConfig(**values)


def _generation(given: Mapping[str, Any]) -> PolicyPPOConfig:
    generation = given.get("generation") or {}
    top_k = generation.get("top_k")
    return _only(
        PolicyPPOConfig,
        rollout_micro_batch_size=given.get("generation_batch_size"),
        forward_micro_batch_size=given.get("logprob_batch_size"),
        length_params=_only(LengthParams, max_length=generation.get("max_new_tokens")),
        sampling_params=SamplingParams(
            top_k=0 if top_k is None or top_k < 0 else top_k,
            end_strings=tuple(generation.get("stop_strings") or ()),
            **{key: generation[key] for key in ("temperature", "top_p") if key in generation},
        ),
    )


def _optimizer(
    given: Mapping[str, Any], section: Mapping[str, Any], notes: Notes
) -> tuple[OptimConfig, float]:
    """The optimizer of either place, and what gradients are clipped to (0: not)."""
    spec, sched = section.get("optimizer", {}), section.get("scheduler", {})
    torch_spec = given.get("optimizer") or {}
    values = {
        "name": spec.get("optimizer"),
        "lr": spec.get("lr"),
        "weight_decay": spec.get("weight_decay"),
        "eps": spec.get("adam_eps"),
        "betas": (spec["adam_beta1"], spec["adam_beta2"])
        if {"adam_beta1", "adam_beta2"} <= spec.keys()
        else None,
    }
    if "name" in torch_spec:
        short = torch_spec["name"].rsplit(".", 1)[-1].lower()
        values["name"] = _OPTIMIZERS.get(short)
        if short not in _OPTIMIZERS:
            notes.refuse("optimizer.name", torch_spec["name"], f"one of {', '.join(_OPTIMIZERS)}")
    allowed = ["lr", "weight_decay", "betas", "eps"]
    for key, value in (torch_spec.get("kwargs") or {}).items():
        if key in allowed:
            values[key] = value
        else:
            judge(f"optimizer.kwargs.{key}", value, allowed, notes)
    values = {key: value for key, value in values.items() if value is not None}
    schedule = _only(
        SchedConfig,
        name=sched.get("lr_decay_style"),
        max_steps=sched.get("lr_decay_iters"),
        warmup_steps=sched.get("lr_warmup_iters"),
        min_lr=spec.get("min_lr"),
    )
    clip = given.get("max_grad_norm", spec.get("clip_grad", 1.0))
    try:
        optim = build(OptimConfig, values, f"{notes.name}.optimizer")
    except ConfigError as error:
        path, _, said = str(error).partition(": ")
        notes.refuse(path.removeprefix(f"{notes.name}."), values, said)
        optim = OptimConfig()
    return dataclasses.replace(optim, sched=schedule), clip or 0.0


def _only(cls: type[Any], **values: Any) -> Any:
    """A ``cls`` of the values that are given."""
    return cls(**{key: value for key, value in values.items() if value is not None})
