"""Meaning of the values of NeMo-RL's keys: nothing, what is done anyway, or what cannot be done.

A key that this library does not have is judged by its value. One that is switched off says nothing.
One that tunes an engine, or the making of a model, changes no result and is named in one line. All
others are refused together, in a table.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from aligner.config.parse import build, field_types, section_in, unknown_key
from aligner.config.roles.optim import SchedConfig
from aligner.errors import ConfigError

# Keys that tune an implementation, as patterns of the dotted key.
_TUNING = """
    logprob_chunk_size make_sequence_length_divisible_by max_total_sequence_length
    refit_buffer_size_gb dequantize_base_checkpoint disable_modelopt_layer_spec
    offload_optimizer_for_logprob quant_batch_size quant_calib_* quant_sequence_length
    tokenizer.chat_template* tokenizer.use_* sequence_packing.sequence_length_round
    sequence_packing.fuse_loss sequence_packing.microbatch_order
    megatron_cfg.apply_rope_fusion megatron_cfg.attention_backend
    megatron_cfg.bias_activation_fusion
    megatron_cfg.checkpoint* megatron_cfg.converter_type megatron_cfg.cuda_graph_*
    megatron_cfg.defer_fp32_logits megatron_cfg.distributed_data_parallel_config
    megatron_cfg.empty_unused_memory_level megatron_cfg.force_* megatron_cfg.fused_linear_*
    megatron_cfg.use_fused_* megatron_cfg.gradient_accumulation_fusion
    megatron_cfg.fine_grained_activation_offloading megatron_cfg.offload_modules
    megatron_cfg.pipeline_dtype megatron_cfg.use_gloo_process_groups megatron_cfg.recompute_modules
    megatron_cfg.moe_enable_deepep megatron_cfg.moe_flex_* megatron_cfg.moe_grouped_gemm
    megatron_cfg.moe_hybridep_* megatron_cfg.moe_per_layer_logging megatron_cfg.moe_permute_fusion
    megatron_cfg.moe_router_dtype megatron_cfg.moe_shared_expert_overlap
    megatron_cfg.moe_token_dispatcher_type megatron_cfg.mtp_detach_heads
    megatron_cfg.mtp_loss_scaling_factor megatron_cfg.mtp_use_repeated_layer
    megatron_cfg.optimizer.bf16 megatron_cfg.optimizer.*offload*
    megatron_cfg.optimizer.overlap_cpu_* megatron_cfg.optimizer.params_dtype
    megatron_cfg.optimizer.sgd_momentum megatron_cfg.optimizer.use_*
    megatron_cfg.scheduler.*weight_decay* megatron_cfg.scheduler.lr_warmup_init
    megatron_cfg.peft.a2a_experimental megatron_cfg.peft.dropout_position
    megatron_cfg.peft.lora_*
    dtensor_cfg._v2 dtensor_cfg.clear_cache_every_n_steps dtensor_cfg.cpu_offload
    dtensor_cfg.moe_parallelizer dtensor_cfg.automodel_kwargs.attn_implementation
    dtensor_cfg.automodel_kwargs.backend dtensor_cfg.automodel_kwargs.force_hf
    dtensor_cfg.automodel_kwargs.use_* tokenizer.video tokenizer.audio
    *.freeze_config.freeze_audio_* *.freeze_config.freeze_vision_*
    generation.backend generation.colocated generation.*_cfg generation.*_kwargs
    generation.mcore_generation_config generation.port_range_* generation.real_quant_*
    generation.refit_* generation.use_async_rollouts generation.val_*
    optimizer.kwargs.foreach optimizer.kwargs.fused optimizer.kwargs.*_dtype
    optimizer.kwargs.master_weights optimizer.kwargs.store_param_remainders
"""
_PATTERNS = tuple(_TUNING.split())
# Values of other keys with which they ask for what is done anyway.
_DONE_ANYWAY: dict[str, tuple[Any, ...]] = {
    "megatron_cfg.expert_tensor_parallel_size": (1,),
    "dtensor_cfg.expert_parallel_size": (1,),
    "dtensor_cfg.dp_replicate_size": (1,),
}
# Keys that only a mixture of experts reads: neutral where the model is dense.
_EXPERTS = {
    "megatron_cfg.freeze_moe_router": "false: the router is trained",
    "megatron_cfg.moe_router_bias_update_rate": "0.0: the router's bias stays",
    "megatron_cfg.moe_router_enable_expert_bias": "false: experts have no bias of the router",
    "megatron_cfg.moe_router_load_balancing_type": "none: no loss balances the experts",
}
# What to use in place of what is asked for and cannot be done.
_REMEDIES = {
    "fsdp_offload_enabled": "model.ppo.offload_adam_states of a run; else false",
    "activation_checkpointing_enabled": "dtensor_cfg.activation_checkpointing",
    "hf_config_overrides": "the checkpoint's own architecture; edit its config.json",
    "draft": "draft.enabled: false; generation.vllm.engine_args of a run drafts",
    "router_replay": "router_replay.enabled: false",
    "quant_cfg": "null; no weight is quantised",
    "dtensor_cfg.lora_cfg": "megatron_cfg.peft; DTensors train all weights",
    "dtensor_cfg.expert_parallel_size": "megatron_cfg.expert_model_parallel_size",
    "dtensor_cfg.dp_replicate_size": "1; weights are shared out over all ranks",
    "dtensor_cfg.custom_parallel_plan": "null; the plan follows from the architecture",
    "megatron_cfg.expert_tensor_parallel_size": "1; megatron_cfg.expert_model_parallel_size",
    "megatron_cfg.num_layers_in_first_pipeline_stage": "null; stages are equal",
    "megatron_cfg.num_layers_in_last_pipeline_stage": "null; stages are equal",
    "megatron_cfg.fp8_cfg": "fp8_cfg.enabled: false, or model.fp8=e4m3 of a run",
    "megatron_cfg.mtp_num_layers": "0; no further tokens are predicted in training",
    "megatron_cfg.peft.target_modules": "[]; model.peft.lora_tuning.target_modules of a run",
    "megatron_cfg.peft.exclude_modules": "[]; model.peft.lora_tuning.target_modules of a run",
    "generation.bad_words": "[]; every token may be drawn",
    "generation.quant_cfg": "null; engines sample from the policy's own weights",
    "generation.real_quant": "false; engines sample from the policy's own weights",
}


@dataclass
class Notes:
    """Keys of a section that become no settings: below ``name``, with values and remedies."""

    name: str
    ignored: list[str] = field(default_factory=list)
    experts: list[tuple[str, Any, str]] = field(default_factory=list)
    refused: list[tuple[str, Any, str]] = field(default_factory=list)

    def refuse(self, path: str, value: Any, remedy: str) -> None:
        """Have a row of the table: a key below the section, its value, what to use."""
        self.refused.append((f"{self.name}.{path}", value, remedy))

    def raise_refused(self) -> None:
        """Raise the table of all that is refused, if anything is."""
        if self.refused:
            raise ConfigError(
                f"{self.name}: asks for what cannot be done here\n{table(self.refused)}"
            )


def table(rows: list[tuple[str, Any, str]]) -> str:
    """Rows of "their key, value, what to use", aligned."""
    shown = [("their key", "value", "what to use")]
    shown += [(key, text[:40], remedy) for key, value, remedy in rows for text in [_text(value)]]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    return "\n".join(
        f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {use}" for key, value, use in shown
    )


def read_section(
    values: Mapping[str, Any], schema: Any, notes: Notes, section: str = ""
) -> dict[str, Any]:
    """The settings of ``schema`` that a mapping holds, validated; the rest goes into ``notes``."""
    types, kept = field_types(schema), {}
    for key, value in values.items():
        path = f"{section}.{key}".lstrip(".")
        below = section_in(types[key]) if key in types else None
        if below is not None and isinstance(value, Mapping):
            is_off = value.get("enabled") is False
            kept[key] = {"enabled": False} if is_off else read_section(value, below, notes, path)
        elif key in types:
            try:
                kept[key] = build(types[key], value, f"{notes.name}.{path}")
            except ConfigError as error:
                said = str(error).removeprefix(f"{notes.name}.{path}: ")
                notes.refuse(path, value, said)
        else:
            judge(path, value, list(types), notes)
    return kept


def judge(path: str, value: Any, known: list[str], notes: Notes) -> None:
    """Take a key without a counterpart as neutral, as tuning or as refused, by its value."""
    key = path.rsplit(".", 1)[-1]
    if any(fnmatchcase(path, pattern) for pattern in _PATTERNS):
        notes.ignored += [f"{notes.name}.{path}"] * (not is_off(value))
    elif path in _EXPERTS and not is_off(value):
        notes.experts.append((f"{notes.name}.{path}", value, _EXPERTS[path]))
    elif isinstance(value, Mapping) and path.endswith(("automodel_kwargs", "freeze_config")):
        for name, inner in value.items():
            judge(f"{path}.{name}", inner, [], notes)
    elif path in _REMEDIES or path in _EXPERTS:
        if not is_off(value) and value not in _DONE_ANYWAY.get(path, ()):
            notes.refuse(path, value, _REMEDIES[path])
    elif not is_off(value) or difflib.get_close_matches(key, known, n=1, cutoff=0.88):
        said = unknown_key(f"{notes.name}.{path}", known, f"{notes.name}.{path}".rpartition(".")[0])
        notes.refuse(path, value, said.partition(": ")[2])


def torch_schedule(entries: Any, lr: float, notes: Notes) -> SchedConfig:
    """Schedule of torch's classes by name, alone or one after the other at ``milestones``.

    ``LinearLR`` up to 1 is the warm-up, which begins at 0 here; ``LinearLR`` down and
    ``CosineAnnealingLR`` are the decay; ``ConstantLR`` of factor 1 is no change.
    """
    parts = [entries] if isinstance(entries, Mapping) else list(entries)
    ours, begin = SchedConfig(), 0
    for part in (part for part in parts if "name" in part):
        kind, kwargs = part["name"].rsplit(".", 1)[-1], part.get("kwargs") or {}
        first, last = kwargs.get("start_factor", 1 / 3), kwargs.get("end_factor", 1.0)
        steps = kwargs.get("total_iters", 5)
        if kind == "ConstantLR" and kwargs.get("factor", 1 / 3) == 1:
            continue
        if kind == "LinearLR" and first == last == 1:
            continue
        if kind == "LinearLR" and first < last == 1 and part is parts[0]:
            ours = dataclasses.replace(ours, warmup_steps=steps)
            notes.ignored.append(f"{notes.name}.scheduler start_factor={first}")
            begin = steps
        elif kind == "LinearLR" and last < first == 1 and ours.name == "constant":
            ours = dataclasses.replace(
                ours, name="linear", max_steps=begin + steps, min_lr=lr * last
            )
        elif kind == "CosineAnnealingLR" and ours.name == "constant":
            ours = dataclasses.replace(
                ours,
                name="cosine",
                max_steps=begin + kwargs["T_max"],
                min_lr=kwargs.get("eta_min", 0.0),
            )
        else:
            notes.refuse("scheduler", part, "LinearLR to or from 1, ConstantLR of 1, or a cosine")
    milestones = [step for part in parts for step in part.get("milestones") or ()]
    if milestones[:1] not in ([], [ours.warmup_steps]):
        notes.refuse("scheduler", {"milestones": milestones}, "milestones at total_iters")
    return ours


def is_off(value: Any) -> bool:
    """Return whether a value says that nothing is wanted."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(map(is_off, value.values()))
    if isinstance(value, str):
        return value.lower() in ("", "none", "null")
    return value is None or value == 0 or value in ([], ())


def _text(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
