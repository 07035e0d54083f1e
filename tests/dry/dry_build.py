"""Cases of `test_dry_build.py`: models as built for a GPU, and what a token of a rollout costs."""

import dataclasses
import gc
import os

import pytest
import torch
from dry_roles import ROWS, architecture_of, build, facts, ready, rollout, share_of_batch
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.transformer.moe.experts import SequentialMLP

import aligner.models.gpt.decode.model as incremental
from aligner.config import LayerOptions, LengthParams
from aligner.device import accelerator
from aligner.errors import ConfigError, DryDeviceError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.logprobs import top_k_top_p as kept_set
from aligner.logprobs.output_layer import VocabShard
from aligner.models.gpt.layers.dot_product import attend_rows
from aligner.models.gpt.layers.layer_spec import GroupedExperts
from aligner.models.gpt.megatron.build import build_gpt, transformer_config
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.gpt.role.training_state import ModelOffload, SwappedWeights
from aligner.parallel.groups import initialize_parallel
from aligner_plan.dry.device import DryDevice
from benchmarks.shapes import SHAPES

BIASED = dataclasses.replace(TINY_ARCHITECTURE, bias_linear=True)
EXPERTS = dataclasses.replace(
    TINY_ARCHITECTURE, num_moe_experts=32, moe_ffn_hidden_size=64, family="mixtral"
)


def updated(architecture, **settings):
    """An actor in bfloat16 after its first update, and the batch of it."""
    role, data, _ = ready({"role": "actor", "precision": "bf16"}, architecture, **settings)
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


def experts(fusions):
    settings = RoleSettings(precision="bf16", layers=LayerOptions(fusions=fusions))
    with DryDevice() as device:
        initialize_parallel(settings.parallel, seed=1)
        layer = build_gpt(EXPERTS, settings, initialize=False).decoder.layers[0].mlp.experts
        assert type(layer) is (GroupedExperts if fusions else SequentialMLP)
        rows = torch.zeros(320, EXPERTS.hidden_size, dtype=torch.bfloat16, device="cuda")
        counts = torch.tensor([0, 20] * 16)
        with device.record() as record:
            out, _ = layer(rows.requires_grad_(), counts, torch.ones(320, device="cuda"))
            out.sum().backward()
        assert all(each.grad is not None for each in layer.parameters())
    return facts(record)


def refusal():
    settings = RoleSettings(layers=LayerOptions(spec="transformer_engine"))
    with DryDevice(), pytest.raises(ConfigError) as refused:
        transformer_config(TINY_ARCHITECTURE, settings)
    return str(refused.value)


def sums_gradients(is_installed):
    megatron_layers._grad_accum_fusion_available = is_installed
    with DryDevice():
        return transformer_config(TINY_ARCHITECTURE).gradient_accumulation_fusion


def determinism(asked):
    with DryDevice():
        if asked:
            accelerator.make_deterministic()
        initialize_parallel(RoleSettings().parallel, seed=1)
        return [
            torch.are_deterministic_algorithms_enabled(),
            transformer_config(TINY_ARCHITECTURE).deterministic_mode,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            os.environ.get("NCCL_ALGO"),
        ]


FEW, MANY = 6, 14


def per_token(graphs=True, **case):
    """Launches, host reads and products of one decoding step; dtype of the logits drawn from.

    And of whole rollouts: bytes on the device more than before.
    """
    case = {"role": "actor", "trained": False, "precision": "bf16", **case}
    dtypes, records = set(), []
    plain = incremental.IncrementalModel.logits

    def logits(model, hidden):
        found = plain(model, hidden)
        dtypes.add(str(found.dtype))
        return found

    incremental.IncrementalModel.logits = logits
    with DryDevice(case.get("world", 1)) as device:
        role = build(case, cuda_graphs=graphs)
        batch, _ = share_of_batch(case, role.parallel.dp_rank, role.parallel.dp_size)
        before = device.memory.alive_bytes
        for length in (FEW, MANY):
            sampling = role.settings.sampling_params
            role.configure_generation(LengthParams(max_length=length), sampling, ROWS)
            with device.record() as record:
                rollout(role, batch)
            records.append(record)
        role.release_generator()
        gc.collect()
        left = device.memory.alive_bytes - before
    few, many = records

    def step(count):
        return (count(many) - count(few)) / (MANY - FEW)

    flops = {str(d): step(lambda record, d=d: record.flops[d]) for d in many.flops}
    return {
        "launches": step(lambda record: record.launches),
        "kernels": step(lambda record: sum(record.kernels.values())),
        "host_reads": step(lambda record: record.host_reads),
        "flops": {name: n for name, n in flops.items() if n},
        "logits": sorted(dtypes),
        "left_bytes": left,
    }


def rollouts(streamed=False, moved=False, **case):
    """Captures so far, and launches and waits, after each of four rollouts; the last of few rows.

    Between the second and the third is an update. ``moved``: weights were away meanwhile.
    """
    case = {"role": "actor", "precision": "bf16", **case}
    found, heard = [], []
    listener = (lambda *token: heard.append(token)) if streamed else None
    with DryDevice() as device:
        role, batch, passes = ready(case, length_params=LengthParams(max_length=MANY))
        for number, rows in enumerate((ROWS, ROWS, ROWS, ROWS - 2)):
            if number == 2:
                if moved:
                    offload = ModelOffload(role.model)
                    offload.to_host(params=True, grads=False)
                    offload.to_device()
                role.prepare_for_training()
                role.training_update(batch, mbs=passes)
                role.finish_training()
            role.prepare_for_inference()
            with device.record() as record:
                rollout(role, {"input_ids": batch["input_ids"][:rows]}, listener)
            found.append([device.captures, record.launches, record.host_reads])
    return {"rollouts": found, "heard": len(heard)}


def captured_against_the_rules():
    with DryDevice() as device:
        counter = torch.zeros((), dtype=torch.int64, device="cuda")

        def good():
            counter.add_(1)
            counter.mul_(2)

        for bad in (
            lambda: counter.item(),
            lambda: counter.add_(torch.ones(3).to("cuda").sum()),
            lambda: counter[counter > 0],
        ):
            with pytest.raises(DryDeviceError, match="inside a CUDA graph"):
                accelerator.capture(bad, None)
        replay = accelerator.capture(good, None)
        assert counter.item() == 0  # captured, not run
        with device.record() as record:
            replay()
            replay()
        return {"launches": record.launches, "value": counter.item()}


def windowed_attention(precision):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with DryDevice() as device:
        shapes = (1, 8, 4096, 64), (1, 2, 4096, 64), (1, 2, 4096, 64)
        inputs = [
            torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes
        ]
        with device.record() as record:
            attend_rows(*inputs, 512, scale=0.125).sum().backward()
        return {"peak_bytes": record.peak_bytes}


def sorted_rows():
    rows = []

    def threshold(logits, top_k, top_p):
        rows.append(logits.shape[0])
        return logits.amax(dim=1)

    kept_set.threshold = threshold
    with DryDevice():
        weight = torch.empty(151_936, 16, dtype=torch.bfloat16, device="cuda")
        hidden = torch.empty(1000, 16, dtype=torch.bfloat16, device="cuda")
        shard = VocabShard.of(weight, 151_936, None)
        kept_set.keep_thresholds(hidden, weight, shard, 0, 0.9)
    return rows
