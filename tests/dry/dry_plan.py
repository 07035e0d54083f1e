"""Cases of `aligner_plan`, which runs roles of a configuration on the dry device."""

import gc
import json
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from aligner.catalog import BY_SCRIPT
from aligner.config.load import parse_config
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner_plan import measure
from aligner_plan.amounts import total
from aligner_plan.command import read_architecture
from aligner_plan.devices import DEVICES
from aligner_plan.dry.device import DryDevice
from aligner_plan.estimate import Estimator
from aligner_plan.measurements import Measurements
from aligner_plan.options import PlanConfig
from aligner_plan.rehearsal import planned_run
from aligner_plan.search import fastest, fewest
from benchmarks.shapes import QWEN_1_5B

SIX = replace(TINY_ARCHITECTURE, num_layers=6, hidden_size=128, ffn_hidden_size=256)
MANY = replace(SIX, num_layers=2, hidden_size=256, vocab_size=259)
EXPERTS = replace(
    MANY, num_moe_experts=4, moe_ffn_hidden_size=128, ffn_hidden_size=128, family="mixtral"
)
LLAMA_70B = replace(
    QWEN_1_5B,
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    num_query_groups=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    tie_embeddings=False,
    bias_qkv=False,
    family="llama",
)
SMALL = replace(DEVICES["h100-80g"], memory_bytes=24 << 20)


SAMPLING = {"num_rollout_samples": 32, "rollout_micro_batch_size": 16}
SAMPLING |= {"length_params": {"max_length": 32}}


def configuration(script, **changes):
    """A run of ``script``; ``changes`` by dotted keys, dots written as two underscores."""
    values = {
        "model": {"restore_from_path": "m.nemo", "micro_batch_size": 2, "global_batch_size": 8},
        "trainer": {"precision": "bf16"},
        "data": {"train": {"source": "t.jsonl"}},
    }
    if script in ("train_gpt_ppo", "train_gpt_reinforce", "train_gpt_rs"):
        values["reward"] = {"function": "a.b:reward"}
        values["data"]["max_prompt_length"] = 32
        values["model"]["rs" if script == "train_gpt_rs" else "ppo"] = {**SAMPLING}
    if script == "train_gpt_ppo":
        values["critic"] = {"micro_batch_size": 2, "global_batch_size": 8}
    if script == "train_gpt_reinforce":
        values["critic"] = None
        values["model"]["ppo"]["num_rollouts_per_prompt"] = 4
        advantage = {"advantage": {"estimator": "grpo"}, "normalize_advantages": False}
        values["trainer"]["ppo"] = advantage
    if script == "train_gpt_distill":
        values["teacher"] = {"restore_from_path": "t.nemo"}
    for key, value in changes.items():
        *sections, last = key.split("__")
        level = values
        for name in sections:
            level = level.setdefault(name, {})
        level[last] = value
    return parse_config(values, BY_SCRIPT[script].root_class)


def beside_collectives(kind, world=2, numbers=1024):
    """Bytes at the peak of each collective, less those before and those of its result."""
    found = {}
    with DryDevice(world, kind=kind) as device:
        place = "cuda" if kind == "gpu" else "cpu"
        whole, part = (torch.ones(count, device=place) for count in (numbers, numbers // world))
        calls = {
            "gathered": lambda: dist.all_gather_into_tensor(whole, part),
            "scattered": lambda: dist.reduce_scatter_tensor(part, whole),
            "reduced": lambda: dist.all_reduce(whole),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "gathered by DTensor": lambda: torch.ops._c10d_functional.all_gather_into_tensor(
                part, world, dist.group.WORLD.group_name
            ),
        }
        for name, call in calls.items():
            with device.record() as record:
                before = device.memory.alive_bytes
                result = call()
                after = device.memory.alive_bytes
            found[name] = record.peak_bytes - after
            assert after - before == (result.nbytes if name.endswith("DTensor") else 0)
            del result
    return found


def norm(requires_grad):
    """Kernels of an RMSNorm in bf16, and bytes that exist after it, for each byte of the result."""
    with DryDevice() as device, torch.inference_mode(not requires_grad):
        hidden = torch.ones(64, 256, dtype=torch.bfloat16, device="cuda")
        weight = torch.ones(256, dtype=torch.bfloat16, device="cuda", requires_grad=requires_grad)
        before = device.memory.alive_bytes
        with device.record() as record:
            out = F.rms_norm(hidden, (256,), weight, 1e-5)
        found = [record.launches, (device.memory.alive_bytes - before) / out.nbytes]
        if requires_grad:
            with device.record() as record:
                out.backward(out.detach())
            found.append(record.launches)
    return found


def estimated(script, length=64, settings=None, **changes):
    plan = PlanConfig(length=None if "data__max_prompt_length" in changes else length)
    shape = replace(SIX, num_layers=2)
    if settings:
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(settings))
            shape = read_architecture(folder, changes.get("policy__backend", "megatron"))
    shapes = {"m.nemo": shape, "t.nemo": shape}
    config = configuration(script, **changes)
    return Estimator(plan, DEVICES["h100-80g"], shapes).estimate(config).as_dict()


def depths(script="train_gpt_ppo", fields=None, **changes):
    shape = replace(SIX, **fields or {})
    run = planned_run(configuration(script, **changes), PlanConfig(), {"m.nemo": shape})
    found = {}
    for name, role in run.roles.items():
        for stage in {0, role.parallel.pipeline - 1}:
            whole = measure.measure_at(role, stage, 6 // role.parallel.pipeline)
            few = measure.measure(role, stage)
            found[f"{name} {stage}"] = [facts(whole), facts(few)]
    return found


def facts(role):
    return {
        "parameters": role.parameters,
        "static": total(role.static),
        **{
            f"{name} {key}": value
            for name, phase in role.phases.items()
            for key, value in {
                "peak": total(phase.peaks[phase.peak_at]),
                "rest": total(phase.remaining),
                "launches": phase.amounts.launches,
                "flops": sum(phase.amounts.flops.values()),
                "wire": sum(phase.amounts.wires.values()),
                "host_reads": phase.amounts.counters.get("host_reads", 0.0),
            }.items()
        },
    }


def actor(recompute, first):
    """Qwen2.5-1.5B's shape on one card: an update of 8 rows of 1,024 tokens, all at a time.

    ``first``: it is the first, which makes the moments once the activations are gone.
    """
    config = configuration(
        "train_gpt_ppo",
        model__micro_batch_size=8,
        model__activations_checkpoint_granularity=recompute,
        trainer__ppo__initial_policy_kl_penalty=0.0,  # no reference
        data__max_prompt_length=512,
        model__ppo__length_params={"max_length": 512},
    )
    role = planned_run(config, PlanConfig(), {"m.nemo": QWEN_1_5B}).roles["policy"]
    train = replace(role.phases[-2], times=1)
    assert train.is_update
    assert train.length == 1024
    before = mock.patch.object(measure._RoleRun, "_first_step") if first else nullcontext()
    with before:
        found = measure.measure(replace(role, phases=(train,)), 0)
    phase = found.phases["train"]
    return {
        "parameters": found.parameters,
        "static": total(found.static),
        "peak": total(phase.peaks[phase.peak_at]),
        "after": total(phase.remaining),
        "flops": phase.amounts.flops,
    }


def adam_step():
    role = planned_run(configuration("train_gpt_sft"), PlanConfig(length=64), {"m.nemo": SIX})
    (policy,) = role.roles.values()
    found = {}
    with DryDevice() as device, measure.without_weights(SIX, policy):
        optimizer = measure.start_worker(policy).model.optimizer
        optimizer.zero_grad()
        optimizer.step()
        inner = optimizer.inner.chained_optimizers[0].optimizer
        gc.collect()
        before = device.memory.alive_bytes
        with device.record() as record:
            inner.step()
        found["taken"] = record.peak_bytes - before
        found["kernels"] = record.launches
        found["moment"] = sum(each["exp_avg"].nbytes for each in inner.state.values())
        found["groups"] = len(inner.param_groups)
    return found


def shared(names):
    plain = {"trainer__devices": 2, "model__tensor_model_parallel_size": 2}
    plain |= {"model__sequence_parallel": True, "trainer__ppo__initial_policy_kl_penalty": 0.0}
    packing = {"enabled": True, "train_mb_tokens": 128, "logprob_mb_tokens": 512}
    plain["model__sequence_packing"] = packing
    variants = {
        "plain": {},
        "recompute": {"model__activations_checkpoint_granularity": "full"},
        "budget": {"model__sequence_packing": {**packing, "train_mb_tokens": 256}},
        "moments": {"model__ppo__offload_adam_states": True},  # the policy's
        "offload": {"critic__offload_weights": True},
    }
    plan, shapes = PlanConfig(length=32), {"m.nemo": replace(SIX, num_layers=1)}
    device, found = DEVICES["h100-80g"], {}
    together = Estimator(plan, device, shapes)
    for name in names:
        config = configuration("train_gpt_ppo", **{**plain, **variants[name]})
        before = together.measurements.measured
        one = together.estimate(config).as_dict()
        new = together.measurements.measured - before
        found[name] = {"new": new, "together": one}
    found[names[-1]]["alone"] = whole(config, plan, device, shapes)
    return found


def whole(config, plan, device, shapes):
    """An estimate whose roles are measured in one piece, all phases in the order of a step."""

    class Whole(Measurements):
        def of(self, stages):
            return [measure.measure(role, stage) for role, stage in stages]

    return Estimator(plan, device, shapes, Whole()).estimate(config).as_dict()


def in_processes():
    plan, shapes = PlanConfig(length=32), {"m.nemo": SIX}
    config = configuration("train_gpt_sft")
    found = []
    for processes in (2, 1):  # forks come before this process has run a backward pass
        with closing(Measurements(processes)) as measurements:
            estimator = Estimator(plan, DEVICES["h100-80g"], shapes, measurements)
            found.append(estimator.estimate(config).as_dict())
    return found


def bounded(script, **changes):
    plan, shapes = PlanConfig(length=64), {"m.nemo": MANY, "t.nemo": MANY}
    if changes.get("model__expert_model_parallel_size"):
        shapes = {"m.nemo": EXPERTS}
    estimator = Estimator(plan, DEVICES["h100-80g"], shapes)
    config = configuration(script, **changes)
    found, least = estimator.estimate(config), estimator.lower_bounds(config)
    return {
        "seconds": [least.step_seconds, found.step_seconds],
        "bytes": [least.card_bytes, found.peak_bytes],
    }


def seventy():
    changes = {
        "trainer__devices": 8,
        "trainer__num_nodes": 8,
        "model__tensor_model_parallel_size": 8,
        "model__pipeline_model_parallel_size": 2,
        "model__sequence_parallel": True,
        "model__global_batch_size": 256,
        "critic__global_batch_size": 256,
        "model__ppo__num_rollout_samples": 1024,
        "trainer__ppo__initial_policy_kl_penalty": 0.0,
        "model__sequence_packing": {"enabled": True, "train_mb_tokens": 4096},
        "critic__offload_weights": True,
        "model__ppo__offload_gradients": True,
        "model__ppo__offload_adam_states": True,
    }
    config = configuration("train_gpt_ppo", **changes)
    estimator = Estimator(PlanConfig(length=512), DEVICES["h100-80g"], {"m.nemo": LLAMA_70B})
    return estimator.estimate(config).as_dict()


def searched():
    estimator = Estimator(PlanConfig(margin=0.0, length=256), SMALL, {"m.nemo": SIX})
    config = configuration("train_gpt_sft", trainer__devices=2)
    found = fastest(estimator, config)
    return {"plan": found.estimate.as_dict(), "overrides": found.overrides, "tried": found.tried}


def automatic(memory):
    device = replace(SMALL, memory_bytes=memory)
    estimator = Estimator(PlanConfig(margin=0.0, length=256), device, {"m.nemo": SIX})
    return fewest(estimator, configuration("train_gpt_sft")).as_dict()
