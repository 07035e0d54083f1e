"""Cases of `test_dry_build.py`, for the process behind the fixture `dry`."""

import dataclasses
import gc
import os

import torch
from dry_roles import architecture_of, build, facts, rollout, share_of_batch
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.transformer.moe.experts import SequentialMLP

from aligner.config import LayerOptions
from aligner.device import accelerator
from aligner.errors import ConfigError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt.layers.layer_spec import GroupedExperts
from aligner.models.gpt.megatron.build import build_gpt, transformer_config
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.gpt.role.training_state import SwappedWeights
from aligner.parallel.groups import initialize_parallel
from aligner_plan.dry.device import DryDevice
from benchmarks.shapes import SHAPES

BIASED = dataclasses.replace(TINY_ARCHITECTURE, bias_linear=True)
EXPERTS = dataclasses.replace(
    TINY_ARCHITECTURE, num_moe_experts=32, moe_ffn_hidden_size=64, family="mixtral"
)


def updated(architecture, **settings):
    """An actor in bfloat16 after its first update, and the batch of it."""
    case = {"role": "actor", "precision": "bf16"}
    role, (data, _) = build(case, architecture, **settings), share_of_batch(case, 0, 1)
    role.loss_fn = PPOPolicyLoss()
    role.prepare_for_training()
    role.training_update(data)
    return role, data


def actor(biased, fusions):
    architecture = BIASED if biased else TINY_ARCHITECTURE
    with DryDevice() as device:
        role, data = updated(architecture, layers=LayerOptions(fusions=fusions))
        with device.record() as update:
            role.training_update(data)
        role.prepare_for_inference()
        with device.record() as scoring:
            role.get_logprobs(data)
    return {"update": facts(update), "scoring": facts(scoring)}


def family(name):
    with DryDevice() as device:
        role, data = updated(architecture_of({"family": name}))
        with device.record() as update:
            role.training_update(data)
    return facts(update)


def locked_bytes():
    with DryDevice() as device:
        role, _ = updated(SHAPES["qwen2.5-7b"], offload_adam_states=True)
        count = sum(each.numel() for each in role.gpt.parameters())
        found = []
        for _ in range(2):
            role.prepare_for_inference()
            found.append(sum(map(len, device.order._locked)))
            role.prepare_for_training()
        del role
        gc.collect()
        return {"parameters": count, "locked": found, "left": len(device.order._locked)}


def exchange():
    with DryDevice() as device:
        parameters = {str(n): torch.empty(64, 64, device="cuda") for n in range(20)}
        swapped = SwappedWeights(parameters)
        with device.record() as record:
            swapped.exchange()
        return {"waits": record.host_reads, "launches": record.launches}


def placement(offload):
    """Bytes that training keeps, those while others work, and those after it goes on."""
    with DryDevice() as device:
        role, data = updated(TINY_ARCHITECTURE, offload_gradients=offload)
        role.finish_training()
        found = {
            "parameters": sum(each.numel() for each in role.gpt.parameters()),
            "training": device.memory.alive_bytes,
        }
        role.prepare_for_inference()
        found["rollout"] = device.memory.alive_bytes
        rollout(role, data)
        role.get_logprobs(data)
        role.prepare_for_training()
        found["back"] = device.memory.alive_bytes
        role.training_update(data)
    return found


def experts():
    found = {}
    with DryDevice() as device:
        initialize_parallel(RoleSettings().parallel, seed=1)
        for fusions in (False, True):
            gpt = build_gpt(
                EXPERTS,
                RoleSettings(precision="bf16", layers=LayerOptions(fusions=fusions)),
                initialize=False,
            )
            layer = gpt.decoder.layers[0].mlp.experts
            assert type(layer) is (GroupedExperts if fusions else SequentialMLP)
            rows = torch.zeros(320, EXPERTS.hidden_size, dtype=torch.bfloat16, device="cuda")
            counts = torch.tensor([0, 20] * 16)
            with device.record() as record:
                out, _ = layer(rows.requires_grad_(), counts, torch.ones(320, device="cuda"))
                out.sum().backward()
            assert all(each.grad is not None for each in layer.parameters())
            found[str(fusions)] = facts(record)
    return found


def refusal():
    with DryDevice():
        try:
            layers = LayerOptions(spec="transformer_engine")
            transformer_config(TINY_ARCHITECTURE, RoleSettings(layers=layers))
        except ConfigError as error:
            return str(error)
    return ""


def gradient_sums():
    found = []
    with DryDevice():
        for there in (False, True):
            megatron_layers._grad_accum_fusion_available = there
            found.append(transformer_config(TINY_ARCHITECTURE).gradient_accumulation_fusion)
        megatron_layers._grad_accum_fusion_available = False
    return found


def determinism():
    found = []
    for asked in (False, True):
        with DryDevice():
            if asked:
                accelerator.make_deterministic()
            initialize_parallel(RoleSettings().parallel, seed=1)
            config = transformer_config(TINY_ARCHITECTURE)
            found.append(
                [
                    torch.are_deterministic_algorithms_enabled(),
                    config.deterministic_mode,
                    os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
                    os.environ.get("NCCL_ALGO"),
                ]
            )
    return found
