"""Roles on the dry device: the parts, and the case that takes a role through its phases.

A case says role, layout and batching by these keys, all of which have a default::

    role        actor, critic, reward, dpo, student, teacher, reference, shared reward
    backend     megatron, dtensor
    world, rank, tp, pp, cp, ep     processes, the place among them, and sizes of the layout
    batching    padded, dynamic, packed, shared
    precision   32, bf16
    recompute   selective, full
    trained     False: the role only scores (and generates)
    lora, offload, reference (keep, swap), experts
    top_p, top_k, penalty, kept     of sampling; how many of the tokens kept are recorded
    learned     learned positions, LayerNorm and biases
    vocab       its size, where it is not the tiny model's
    deterministic
"""

import dataclasses
import gc
import math
from types import SimpleNamespace

import torch

from aligner.architecture import RopeScaling
from aligner.checkpoint.canonical import expected_shapes
from aligner.config import LengthParams, LoraConfig, OptimConfig, ParallelConfig, SamplingParams
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.losses.distillation import DistillationLoss
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.preference import DPOLoss
from aligner.losses.reward import BradleyTerryLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import MegatronGPTActorModel, MegatronGPTCriticModel, MegatronGPTRewardModel
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.dtensor.critic import DTensorCriticModel
from aligner.models.gpt.megatron.reward import SharedBackboneRewardModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.worker import passes_over
from aligner.parallel.groups import initialize_parallel
from aligner_plan.dry.device import DryDevice

TOKENIZER = byte_level_tokenizer()
ROWS, LENGTH, PROMPT, NEW_TOKENS, TOP_K = 8, 48, 8, 4, 5
PREFIX = 24  # tokens that all rows begin with, where they begin alike
ROLES = {
    "actor": (MegatronGPTActorModel, PPOPolicyLoss),
    "dpo": (MegatronGPTActorModel, DPOLoss),
    "student": (MegatronGPTActorModel, DistillationLoss),
    "teacher": (MegatronGPTActorModel, None),
    "reference": (MegatronGPTActorModel, PPOPolicyLoss),
    "critic": (MegatronGPTCriticModel, PPOValueLoss),
    "shared reward": (MegatronGPTCriticModel, PPOValueLoss),
    "reward": (MegatronGPTRewardModel, BradleyTerryLoss),
}
IN_PAIRS = ("dpo", "reward")  # roles whose losses compare adjacent rows
VALUED = ("critic", "reward", "shared reward")
MIXTURE = dataclasses.replace(
    TINY_ARCHITECTURE, num_moe_experts=4, moe_ffn_hidden_size=32, family="mixtral"
)


LEARNED = dataclasses.replace(
    TINY_ARCHITECTURE,
    position_embedding="learned_absolute",
    normalization="layernorm",
    activation="gelu",
    bias_linear=True,
    bias_qkv=True,
    tie_embeddings=True,
    num_query_groups=8,
    family="gpt2",
)


FAMILIES = {
    "gemma3": {"window_size": 6, "layers_without_window": (1,), "window_rotary_base": 100.0}
    | {"branch_norms": "both", "qk_layernorm": True, "normalization": "rmsnorm1p"}
    | {"activation": "geglu_tanh", "embedding_multiplier": 8.0},
    "gemma2": {"window_size": 6, "layers_without_window": (1,), "branch_norms": "both"}
    | {"attention_cap": 50.0, "logits_cap": 30.0},
    "gpt_oss": {"num_moe_experts": 4, "activation": "clamped_swiglu", "activation_clamp": 7.0}
    | {"bias_linear": True, "attention_sinks": True},
    "olmo2": {"branch_norms": "after", "qk_layernorm": True, "qk_norm_over_heads": True},
    "granite": {"residual_multiplier": 0.2, "logits_divisor": 8.0, "attention_scale": 0.1},
    "smollm3": {"layers_without_rope": (0, 2), "rope_scaling": RopeScaling(2.0, kind="yarn")},
    "qwen2_moe": {"num_moe_experts": 4, "moe_ffn_hidden_size": 32}
    | {"moe_shared_expert_size": 32, "moe_shared_expert_gate": True},
    "glm4_moe": {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_shared_expert_size": 32}
    | {"layers_without_experts": (0,), "moe_router_sigmoid": True, "moe_router_groups": 2},
    "deepseek_v3": {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_sigmoid": True}
    | {"kv_lora_rank": 16, "q_lora_rank": 16, "value_channels": 4, "rotary_percent": 0.5}
    | {"num_query_groups": TINY_ARCHITECTURE.num_attention_heads},
}


def architecture_of(case):
    """The tiny model, as a family computes, its mixture of experts, or one like GPT-2."""
    if "family" in case:
        return dataclasses.replace(TINY_ARCHITECTURE, **FAMILIES[case["family"]])
    has_experts = case.get("experts") or case.get("ep", 1) > 1
    architecture = MIXTURE if has_experts else LEARNED if case.get("learned") else TINY_ARCHITECTURE
    return dataclasses.replace(architecture, vocab_size=case.get("vocab", architecture.vocab_size))


def source(architecture, *, head=False):
    """An open model whose weights are made up as they are read."""
    shapes = dict(expected_shapes(architecture))
    if head:
        shapes |= {"rm_head.weight": (1, architecture.hidden_size), "rm_head.bias": (1,)}

    class Weights(dict):
        def __getitem__(self, name):
            return torch.zeros(shapes[name])

    return SimpleNamespace(
        config={"vocab_size": architecture.vocab_size},
        architecture=architecture,
        weights=Weights(shapes),
        tokenizer=TOKENIZER,
        tokenizer_files={},
    )


def adapters_of(case):
    has_experts = architecture_of(case).num_moe_experts is not None
    return LoraConfig(target_modules=("attention" if has_experts else "all",), adapter_dim=4)


def settings_of(case):
    tp = case.get("tp", 1)
    parallel = ParallelConfig(
        tensor=tp,
        pipeline=case.get("pp", 1),
        context=case.get("cp", 1),
        expert=case.get("ep", 1),
        sequence_parallel=tp > 1 and case.get("backend", "megatron") == "megatron",
    )
    return RoleSettings(
        parallel=parallel,
        precision=case.get("precision", "32"),
        recompute=case.get("recompute"),
        optim=OptimConfig(lr=1e-5) if case.get("trained", True) else None,
        lora=adapters_of(case) if case.get("lora") else None,
        sequence_packing=case.get("batching") == "packed",
        sequence_length_round=4 if case.get("batching") == "dynamic" else 1,
        micro_batch_size=ROWS // 2,
        global_batch_size=ROWS * parallel.data_size(case.get("world", 1)),
        offload_adam_states=case.get("offload", False),
        length_params=LengthParams(max_length=NEW_TOKENS),
        sampling_params=SamplingParams(
            top_p=case.get("top_p", 1.0),
            top_k=case.get("top_k", 0),
            repetition_penalty=case.get("penalty", 1.0),
        ),
        record_kept=case.get("kept", 0),
        rollout_micro_batch_size=ROWS,
    )


def share_of_batch(case, data_rank, data_size):
    """One data-parallel rank's rows on the device, and its micro-batches.

    Rows have several lengths. Micro-batches are formed as runs form them.
    """
    rows = ROWS * data_size
    lengths = LENGTH - torch.arange(rows) % ROWS * 3
    inside = (torch.arange(LENGTH) < lengths[:, None]).float()
    floats = (
        *("advantages", "returns", "values"),
        *("prev_logprobs", "generation_logprobs", "ref_logprobs"),
    )
    # Rows that begin alike go through the model once.
    tokens = torch.arange(rows)[:, None].repeat(1, LENGTH)
    if case.get("batching") == "shared":
        tokens[:, :PREFIX] = 0
    columns = {
        "input_ids": tokens,
        "input_lengths": lengths,
        "token_mask": inside * (torch.arange(LENGTH) >= PROMPT),
        "sample_mask": torch.ones(rows),
        **{name: torch.zeros(rows, LENGTH) for name in floats},
    }
    if case["role"] == "student":
        columns["teacher_topk_indices"] = torch.arange(TOP_K).repeat(rows, LENGTH, 1)
        columns["teacher_topk_logits"] = torch.zeros(rows, LENGTH, TOP_K)
    if "kept" in case:  # of every other row
        kept = torch.arange(case["kept"], dtype=torch.int32).repeat(rows, LENGTH, 1)
        columns["kept_ids"] = kept.masked_fill(torch.arange(rows)[:, None, None] % 2 == 1, -1)
    data = BatchedDataDict(columns)
    common = {
        "max_tokens_per_microbatch": LENGTH * ROWS // 2,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "rows_per_group": 2 if case["role"] in IN_PAIRS else 1,
    }
    options = {}
    if case.get("batching") == "dynamic":
        options["dynamic_batching_args"] = {**common, "sequence_length_round": 4}
    elif case.get("batching") == "packed":
        options["sequence_packing_args"] = {
            **common,
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_pad_multiple": math.lcm(case.get("tp", 1), 2 * case.get("cp", 1)),
        }
    shards = data.shard_by_batch_size(data_size, rows, **options)
    if options:
        shards, _ = shards  # with the order of the rows
    return passes_over(shards[data_rank].get_batch(0), None)


def build(case, architecture=None, **settings):
    """The role a case asks for; a shared reward's is the critic that lends its body."""
    settings = dataclasses.replace(settings_of(case), **settings)
    architecture = architecture or architecture_of(case)
    cls, _ = ROLES[case["role"]]
    if case.get("backend") == "dtensor":
        parallel = initialize_parallel(settings.parallel)
        valued = case["role"] in VALUED
        cls = DTensorCriticModel if valued else DTensorActorModel
        role = cls(source(architecture, head=valued), settings, parallel, TOKENIZER)
    else:
        role = cls(
            {"vocab_size": architecture.vocab_size},
            settings=settings,
            architecture=architecture,
            tokenizer=TOKENIZER,
            initialize=False,
        )
    if case["role"] == "reference":
        role.keep_reference(case.get("reference", "keep"))
    return role


def ready(case, architecture=None, **settings):
    """The role that a case asks for, set up to train, its rows and its micro-batches."""
    role = build(case, architecture, **settings)
    batch, passes = share_of_batch(case, role.parallel.dp_rank, role.parallel.dp_size)
    role.setup_training()
    role.loss_fn = ROLES[case["role"]][1]()
    return role, batch, passes


def score(role, case, batch, passes):
    if case["role"] == "shared reward":
        return role.infer_rm_critic(batch)
    if case["role"] in VALUED:
        return role.get_values(batch, passes)
    if case["role"] == "teacher":
        return role.get_topk_logits(batch, TOP_K, role.architecture.vocab_size, passes)
    if case["role"] == "reference":
        return role.get_reference_logprobs(batch, passes)
    plain = {key: value for key, value in batch.items() if not key.startswith("teacher_")}
    return role.get_logprobs(plain, passes)


def rollout(role, batch, listener=None):
    if isinstance(role, DTensorActorModel):
        role.prepare_for_generation()
    prompts = batch["input_ids"][:, :PROMPT].contiguous()
    lengths = torch.full((prompts.shape[0],), PROMPT, device="cuda")
    numbers = torch.arange(prompts.shape[0], device="cuda")
    return role.generator.sample(prompts, lengths, numbers, seed=1, listener=listener)


def phases(**case):
    """Set-up, two updates, scoring, a rollout, and the changes of phase between them."""
    found = {}
    if case.get("deterministic"):
        accelerator.make_deterministic()
    with DryDevice(case.get("world", 1), case.get("rank", 0)) as device:
        role = build(case)
        place = role.parallel
        batch, passes = share_of_batch(case, place.dp_rank, place.dp_size)
        found["parameters"] = role.num_parameters()
        before = device.memory.alive_bytes
        if case["role"] == "shared reward":
            lent = SharedBackboneRewardModel.in_critic(
                role,
                source(role.architecture, head=True),
                settings=dataclasses.replace(role.settings, optim=None),
                tokenizer=TOKENIZER,
            )
            assert role.rewards_of == lent.infer
        if case.get("trained", True) and case["role"] != "teacher":
            role.setup_training()
            role.loss_fn = ROLES[case["role"]][1]()
            for name in ("first", "update"):
                role.prepare_for_training()
                with device.record() as update:
                    outcome = role.training_update(batch, mbs=passes)
                assert outcome["skipped"] == 0.0
                role.finish_training()
                found[name] = facts(update)
                device.name_memory(role.model)
            found["static_bytes"] = device.memory.alive_bytes - before
        role.prepare_for_inference()
        found["inference_bytes"] = device.memory.alive_bytes - before
        with device.record() as scoring:
            score(role, case, batch, passes)
        found["scoring"] = facts(scoring)
        # Earlier pipeline stages are told what the last one drew, which nobody does here.
        if case["role"] not in VALUED and place.is_last_stage:
            with device.record() as sampling_options:
                drawn = rollout(role, batch)
            found["rollout"] = facts(sampling_options)
            found["kept"] = None if drawn.kept_ids is None else str(drawn.kept_ids.device)
        getattr(role, "finish_generation", role.finish_inference)()
        if "update" in found:
            with device.record() as back:
                role.prepare_for_training()
            found["back_copied_bytes"] = back.copied_bytes
            with_graphs = device.memory.alive_bytes
            role.release_generator()
            gc.collect()
            found["back_bytes"] = device.memory.alive_bytes - before
            found["graph_bytes"] = with_graphs - device.memory.alive_bytes
    return found


def facts(record):
    return {
        "launches": record.launches,
        "host_reads": record.host_reads,
        "host_waits": dict(record.host_waits),
        "flops": {str(dtype).removeprefix("torch."): n for dtype, n in record.flops.items()},
        "peak_bytes": record.peak_bytes,
        "peak_at": record.peak_at,
        "kinds": {str(kind): n for kind, n in record.peak.kinds.items()},
        "copied_bytes": record.copied_bytes,
        "collectives": {f"{c.name}/{c.group_size}": n for c, n in record.collectives.items()},
    }
