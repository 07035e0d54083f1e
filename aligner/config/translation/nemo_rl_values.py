"""Treatment of NeMo-RL's keys that this library lacks.

A key whose value switches it off is accepted. A key that only tunes an implementation is ignored
and reported. All other keys are refused.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from aligner.config.parse import unknown_key
from aligner.config.roles.optim import SchedConfig

# Prefix of a section → patterns of keys in it that only tune an implementation.
_TUNING = {
    "": """
        logprob_chunk_size make_sequence_length_divisible_by max_total_sequence_length
        refit_buffer_size_gb dequantize_base_checkpoint disable_modelopt_layer_spec
        offload_optimizer_for_logprob quant_batch_size quant_calib_* quant_sequence_length
        *.freeze_config.freeze_audio_* *.freeze_config.freeze_vision_*
    """,
    "tokenizer.": "chat_template* use_* video audio",
    "sequence_packing.": "sequence_length_round fuse_loss microbatch_order",
    "megatron_cfg.": """
        apply_rope_fusion attention_backend bias_activation_fusion checkpoint* converter_type
        cuda_graph_* defer_fp32_logits distributed_data_parallel_config empty_unused_memory_level
        force_* fused_linear_* use_fused_* fp8_cfg.fp8_recipe gradient_accumulation_fusion
        fine_grained_activation_offloading offload_modules pipeline_dtype use_gloo_process_groups
        recompute_modules mtp_detach_heads mtp_loss_scaling_factor mtp_use_repeated_layer
        scheduler.*weight_decay* scheduler.lr_warmup_init peft.a2a_experimental
        peft.dropout_position peft.lora_*
    """,
    "megatron_cfg.moe_": """
        enable_deepep flex_* grouped_gemm hybridep_* per_layer_logging permute_fusion router_dtype
        shared_expert_overlap token_dispatcher_type
    """,
    "megatron_cfg.optimizer.": "bf16 *offload* overlap_cpu_* params_dtype sgd_momentum use_*",
    "dtensor_cfg.": """
        _v2 clear_cache_every_n_steps cpu_offload dp_replicate_size moe_parallelizer
        sequence_parallel
    """,
    "dtensor_cfg.automodel_kwargs.": "attn_implementation backend force_hf use_*",
    "generation.": """
        backend colocated *_cfg *_kwargs mcore_generation_config port_range_* real_quant_* refit_*
        use_async_rollouts val_*
    """,
    "optimizer.kwargs.": "foreach fused *_dtype master_weights store_param_remainders",
}
_PATTERNS = [start + name for start, names in _TUNING.items() for name in names.split()]
# Key → values that are accepted, because this library always behaves so.
_DONE_ANYWAY: dict[str, tuple[Any, ...]] = {
    "megatron_cfg.expert_tensor_parallel_size": (1,),
    "dtensor_cfg.context_parallel_size": (1,),
    "dtensor_cfg.expert_parallel_size": (1,),
    "megatron_cfg.peft.exclude_modules": (["*out_proj*"],),  # modules of Mamba, not of a GPT
}
# Key that has an effect only in mixtures of experts → remedy.
_EXPERTS = {
    "megatron_cfg.moe_router_enable_expert_bias": "false, or moe_router_bias_update_rate: 0.0",
    "megatron_cfg.moe_router_bias_update_rate": "0.0, or moe_router_enable_expert_bias: false",
    "megatron_cfg.moe_router_load_balancing_type": "none (no loss balances the experts)",
}
# Key that is not supported → what to use.
_REMEDIES = {
    "fsdp_offload_enabled": "false, or model.ppo.offload_adam_states of a run",
    "activation_checkpointing_enabled": "dtensor_cfg.activation_checkpointing",
    "hf_config_overrides": "the checkpoint's own architecture. Edit its config.json",
    "draft": "draft.enabled: false, or generation.vllm.engine_args of a run",
    "router_replay": "router_replay.enabled: false",
    "quant_cfg": "null (weights are not quantised)",
    "reward_model_cfg": "aligner.models.reward.reward_model.RewardModel: a policy has no head",
    "dtensor_cfg.context_parallel_size": (
        "1, or megatron_cfg: dtensor supports only data and tensor parallelism"
    ),
    "dtensor_cfg.lora_cfg": "megatron_cfg.peft (dtensor trains all weights)",
    "dtensor_cfg.expert_parallel_size": "megatron_cfg.expert_model_parallel_size",
    "dtensor_cfg.custom_parallel_plan": "null (the plan follows from the architecture)",
    "megatron_cfg.expert_tensor_parallel_size": "1, or megatron_cfg.expert_model_parallel_size",
    "megatron_cfg.fp8_cfg.fp8_param": "false (weights are kept in bf16)",
    "megatron_cfg.mtp_num_layers": "0 (training predicts only the next token)",
    "megatron_cfg.peft.target_modules": "[], or model.peft.lora_tuning.target_modules of a run",
    "megatron_cfg.peft.exclude_modules": "[], or model.peft.lora_tuning.target_modules of a run",
    "generation.bad_words": "[] (every token may be sampled)",
    "generation.quant_cfg": "null (engines sample from the policy's weights)",
    "generation.real_quant": "false (engines sample from the policy's weights)",
}


@dataclass
class Notes:
    """Keys that this library lacks in the section ``name`` of NeMo-RL.

    ``ignored``: keys without effect. ``refused``: (key, value, remedy) of unsupported keys.
    ``experts``: the same for keys that only mixtures of experts do not support.
    """

    name: str
    ignored: list[str] = field(default_factory=list)
    experts: list[tuple[str, Any, str]] = field(default_factory=list)
    refused: list[tuple[str, Any, str]] = field(default_factory=list)

    def refuse(self, path: str, value: Any, remedy: str) -> None:
        """Add a key to the refused keys. ``path``: dotted key within the section."""
        self.refused.append((f"{self.name}.{path}", value, remedy))


def judge(path: str, value: Any, known: list[str], notes: Notes) -> None:
    """Add a key to the ignored or refused keys, unless its value switches it off.

    ``path``: dotted key within the section. ``known``: keys of this library in the same section,
    which are suggested for misspelt keys.
    """
    full, is_neutral = f"{notes.name}.{path}", is_off(value)
    # The first table that contains the key decides. Misspelt keys are refused at any value.
    section, _, key = full.rpartition(".")
    if path in _REMEDIES:
        if not is_neutral and value not in _DONE_ANYWAY.get(path, ()):
            notes.refuse(path, value, _REMEDIES[path])
    elif any(fnmatchcase(path, pattern) for pattern in _PATTERNS):
        notes.ignored += [full] * (not is_neutral)
    elif path in _EXPERTS:
        notes.experts += [(full, value, _EXPERTS[path])] * (not is_neutral)
    elif isinstance(value, Mapping) and path.endswith(("automodel_kwargs", "freeze_config")):
        for name, inner in value.items():
            judge(f"{path}.{name}", inner, [], notes)
    elif not is_neutral or difflib.get_close_matches(key, known, n=1, cutoff=0.88):
        notes.refuse(path, value, unknown_key(full, known, section).partition(": ")[2])


def torch_schedule(entries: Any, lr: float, notes: Notes) -> SchedConfig:
    """Convert the learning-rate schedule of NeMo-RL's dtensor backend. ``lr``: maximum rate.

    ``entries``: one of torch's schedules, or several that follow each other at ``milestones``:
    first ``LinearLR`` up to factor 1 (warm-up, which starts from 0 in this library), then
    ``LinearLR`` from 1, ``CosineAnnealingLR`` or ``ConstantLR`` of 1. Others are refused.
    """
    parts = [entries] if isinstance(entries, Mapping) else list(entries)
    schedule = SchedConfig()
    warmup_steps = 0
    for part in (part for part in parts if "name" in part):
        # Missing arguments have torch's defaults.
        kind = part["name"].rsplit(".", 1)[-1]
        kwargs = part.get("kwargs") or {}
        start, end = kwargs.get("start_factor", 1 / 3), kwargs.get("end_factor", 1.0)
        steps = kwargs.get("total_iters", 5)
        is_first_decay = schedule.name == "constant"
        # A factor of 1 changes nothing.
        if kind == "ConstantLR" and kwargs.get("factor", 1 / 3) == 1:
            continue
        if kind == "LinearLR" and start == end == 1:
            continue
        # Accept a warm-up, then one decay.
        if kind == "LinearLR" and start < end == 1 and part is parts[0]:
            warmup_steps = steps
            schedule = replace(schedule, warmup_steps=steps)
            notes.ignored.append(f"{notes.name}.scheduler start_factor={start}")
        elif kind == "LinearLR" and end < start == 1 and is_first_decay:
            max_steps = warmup_steps + steps
            schedule = replace(schedule, name="linear", max_steps=max_steps, min_lr=lr * end)
        elif kind == "CosineAnnealingLR" and is_first_decay:
            max_steps, min_lr = warmup_steps + kwargs["T_max"], kwargs.get("eta_min", 0.0)
            schedule = replace(schedule, name="cosine", max_steps=max_steps, min_lr=min_lr)
        else:
            notes.refuse("scheduler", part, "LinearLR to or from 1, ConstantLR of 1, or a cosine")
    # The decay must begin when the warm-up ends.
    milestones = [step for part in parts for step in part.get("milestones") or ()]
    if milestones and milestones[0] != schedule.warmup_steps:
        notes.refuse("scheduler", {"milestones": milestones}, "milestones at total_iters")
    return schedule


def is_off(value: Any) -> bool:
    """Return whether a value switches a key off: null, 0, false, empty, or ``enabled: false``."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(map(is_off, value.values()))
    if isinstance(value, str):
        return value.lower() in ("", "none", "null")
    return value is None or value == 0 or value in ([], ())
