"""Policies and critics described as in NeMo-RL: mappings of `PolicyConfig` and `ValueConfig`.

`published_role` turns one into this library's own sections. A key is of three kinds: it has a
counterpart here; it tunes an implementation that this library does not have (`_UNUSED`: accepted,
and named in a warning); or it is unknown and refused.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import StrictBool, StrictFloat, StrictStr
from typing_extensions import TypedDict

from aligner.config.fields import Count, Integer, ModelPath, Natural, NonNegative, Positive
from aligner.config.parse import build, unknown_key
from aligner.config.roles.model import (
    CriticConfig,
    DynamicBatchingConfig,
    ModelConfig,
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
    dropout: NonNegative


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
    algorithm: StrictStr


class GenerationSpec(TypedDict, total=False):
    """``generation``, by the policy's own workers."""

    max_new_tokens: Count
    temperature: Positive
    top_p: StrictFloat
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


# Published keys without a counterpart that change no result here.
_UNUSED = {
    "": """logprob_chunk_size make_sequence_length_divisible_by max_total_sequence_length
        refit_buffer_size_gb dequantize_base_checkpoint""",
    "tokenizer": "chat_template chat_template_kwargs use_processor",
    "megatron_cfg": """apply_rope_fusion bias_activation_fusion converter_type defer_fp32_logits
        distributed_data_parallel_config empty_unused_memory_level expert_tensor_parallel_size
        force_overwrite_initial_ckpt gradient_accumulation_fusion moe_enable_deepep
        moe_per_layer_logging moe_permute_fusion moe_shared_expert_overlap
        moe_token_dispatcher_type pipeline_dtype""",
    "megatron_cfg.optimizer": """bf16 fp16 optimizer_cpu_offload optimizer_offload_fraction
        params_dtype sgd_momentum use_distributed_optimizer use_precision_aware_optimizer""",
    "megatron_cfg.scheduler": """end_weight_decay lr_warmup_init start_weight_decay
        weight_decay_incr_style""",
    "megatron_cfg.peft": """a2a_experimental dropout_position lora_A_init_method
        lora_B_init_method lora_dtype""",
    "dtensor_cfg": "_v2 automodel_kwargs clear_cache_every_n_steps cpu_offload",
    "generation": "backend colocated vllm_cfg vllm_kwargs",
    "optimizer.kwargs": "foreach fused",
}
_UNUSED_NAMES = {section: names.split() for section, names in _UNUSED.items()}
# Published keys that change what is computed, with the values that ask for what is done here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hf_config_overrides": (None, {}),
    "scheduler": (None,),
    "dtensor_cfg.custom_parallel_plan": (None,),
    "dtensor_cfg.lora_cfg": (None, {"enabled": False}),
    "megatron_cfg.freeze_moe_router": (False,),
    "megatron_cfg.num_layers_in_first_pipeline_stage": (None,),
    "megatron_cfg.num_layers_in_last_pipeline_stage": (None,),
    "megatron_cfg.peft.target_modules": ([], (), None),
    "megatron_cfg.peft.exclude_modules": ([], (), None),
}
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


def published_role(
    values: Mapping[str, Any], name: Literal["policy", "value"] = "policy"
) -> PublishedRole:
    """Read a mapping of `PolicyConfig` (``name="policy"``) or `ValueConfig`.

    A missing key has the default of the section it becomes. ``context_parallel_size`` above
    1 needs ``megatron_cfg``.

    Raises:
        ConfigError: neither or both backends are enabled; a key is unknown, or has a value that
            cannot work. The message begins with the key below ``name``.
    """
    if isinstance(values, DictConfig):
        values = OmegaConf.to_container(values, resolve=True)  # type: ignore[assignment]
    schema: type[Any] = PolicyConfig if name == "policy" else ValueConfig
    unused: list[str] = []
    plain = _without_unused(values, "", name, unused)
    given: dict[str, Any] = build(schema, plain, name)
    if unused:
        warnings.warn(f"without a counterpart here: {', '.join(unused)}", stacklevel=3)
    backend = _backend(given, name)
    if "model_name" not in given:
        raise ConfigError(
            f"{name}.model_name: required and not set; give the path of a .nemo file (with "
            "dtensor_cfg also of a Hugging Face directory)"
        )
    section = given[f"{backend}_cfg"]
    optim, clip = _optimizer(given, section, name)
    model = _model(given, section, backend, name, optim)
    generation = given.get("generation") or {}
    return PublishedRole(
        backend=backend,
        model=model,
        critic=_only(
            CriticConfig,
            micro_batch_size=given.get("train_micro_batch_size"),
            global_batch_size=given.get("train_global_batch_size"),
            forward_micro_batch_size=given.get("logprob_batch_size"),
            optim=optim,
        ),
        precision=_choice(_PRECISIONS, given.get("precision", "32"), f"{name}.precision"),
        gradient_clip_val=clip,
        env_vars={key: str(value) for key, value in (section.get("env_vars") or {}).items()},
        generates=given.get("generation") is not None,
        pad_token_id=generation.get("pad_token_id"),
        stop_token_ids=generation.get("stop_token_ids") or (),
    )


def _without_unused(
    values: Mapping[str, Any], section: str, name: str, unused: list[str]
) -> dict[str, Any]:
    """The mapping without the keys that have no counterpart, whose names ``unused`` collects."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{section}.{key}".lstrip(".")
        if path in _NEUTRAL:
            if value not in _NEUTRAL[path]:
                raise ConfigError(
                    f"{name}.{path}={value!r}: has no counterpart here; leave it out, or set it "
                    f"to {_NEUTRAL[path][0]}"
                )
        elif key in _UNUSED_NAMES.get(section, ()):
            unused.append(f"{name}.{path}")
        elif isinstance(value, Mapping) and not path.endswith("env_vars"):
            kept[key] = _without_unused(value, path, name, unused)
        else:
            kept[key] = value
    return kept


def _backend(given: Mapping[str, Any], name: str) -> Literal["megatron", "dtensor"]:
    megatron, dtensor = (
        bool(given.get(key, {}).get("enabled", False)) for key in ("megatron_cfg", "dtensor_cfg")
    )
    if megatron == dtensor:
        both = "both" if megatron else "neither of them"
        raise ConfigError(
            f"{name}.megatron_cfg.enabled, {name}.dtensor_cfg.enabled: {both} true; set exactly "
            "one of them to true"
        )
    return "megatron" if megatron else "dtensor"


def _model(
    given: Mapping[str, Any],
    section: Mapping[str, Any],
    backend: str,
    name: str,
    optim: OptimConfig,
) -> ModelConfig:
    tensor = "tensor_model_parallel_size" if backend == "megatron" else "tensor_parallel_size"
    if backend == "dtensor" and section.get("context_parallel_size", 1) > 1:
        raise ConfigError(
            f"{name}.dtensor_cfg.context_parallel_size={section['context_parallel_size']}: "
            "DTensors have data and tensor parallelism alone; set it to 1, or use megatron_cfg"
        )
    if given.get("reward_model_cfg", {}).get("enabled") and name == "policy":
        raise ConfigError(
            "policy.reward_model_cfg.enabled=true: a policy has no reward head; use "
            "aligner.models.reward.reward_model.RewardModel"
        )
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
        activations_checkpoint_granularity="full"
        if section.get("activation_checkpointing")
        else None,
        peft=PeftConfig("lora", lora_tuning=_lora(peft, name)) if peft.get("enabled") else None,
        optim=optim,
        ppo=_generation(given),
        **{
            key: build(config, given[key], f"{name}.{key}")
            for key, config in batching.items()
            if key in given
        },
    )


def _lora(peft: Mapping[str, Any], name: str) -> LoraConfig:
    fields = {"adapter_dim": "dim", "alpha": "alpha", "adapter_dropout": "dropout"}
    values = {ours: peft[theirs] for ours, theirs in fields.items() if theirs in peft}
    return build(LoraConfig, values, f"{name}.megatron_cfg.peft")


def _generation(given: Mapping[str, Any]) -> PolicyPPOConfig:
    generation = given.get("generation") or {}
    top_k = generation.get("top_k")
    return _only(
        PolicyPPOConfig,
        rollout_micro_batch_size=given.get("generation_batch_size"),
        forward_micro_batch_size=given.get("logprob_batch_size"),
        length_params=_only(LengthParams, max_length=generation.get("max_new_tokens")),
        sampling_params=build(
            SamplingParams,
            {
                "top_k": 0 if top_k is None or top_k < 0 else top_k,
                "end_strings": generation.get("stop_strings") or (),
                **{key: generation[key] for key in ("temperature", "top_p") if key in generation},
            },
            "policy.generation",
        ),
    )


def _optimizer(
    given: Mapping[str, Any], section: Mapping[str, Any], name: str
) -> tuple[OptimConfig, float]:
    """The optimizer of either place, and what gradients are clipped to (0: not)."""
    spec, sched = section.get("optimizer", {}), section.get("scheduler", {})
    torch_spec = given.get("optimizer") or {}
    kwargs = dict(torch_spec.get("kwargs", {}))
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
        values["name"] = _choice(_OPTIMIZERS, short, f"{name}.optimizer.name")
    allowed = ["lr", "weight_decay", "betas", "eps"]
    for key in kwargs:
        if key not in allowed:
            where = f"{name}.optimizer.kwargs"
            raise ConfigError(unknown_key(f"{where}.{key}", allowed, where))
    values |= kwargs
    values = {key: value for key, value in values.items() if value is not None}
    schedule = _only(
        SchedConfig,
        name=sched.get("lr_decay_style"),
        max_steps=sched.get("lr_decay_iters"),
        warmup_steps=sched.get("lr_warmup_iters"),
        min_lr=spec.get("min_lr"),
    )
    clip = given.get("max_grad_norm", spec.get("clip_grad", 1.0))
    optim = build(OptimConfig, values, f"{name}.optimizer")
    return dataclasses.replace(optim, sched=schedule), clip or 0.0


def _only(cls: type[Any], **values: Any) -> Any:
    """A ``cls`` of the values that are given."""
    return cls(**{key: value for key, value in values.items() if value is not None})


def _choice(table: Mapping[str, Any], value: Any, key: str) -> Any:
    if str(value) not in table:
        raise ConfigError(f"{key}={value}: use one of {', '.join(table)}")
    return table[str(value)]
