"""Rollouts on the dry device: what one more token of every sequence costs."""

import dataclasses
import gc

import pytest
import torch
from dry_roles import ROWS, build, rollout, settings_of, share_of_batch

import aligner.models.gpt.decode.model as incremental
from aligner.config import LengthParams
from aligner.device import accelerator
from aligner.errors import DryDeviceError
from aligner.logprobs import top_k_top_p as kept_set
from aligner.logprobs.output_layer import VocabShard
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt.layers.dot_product import attend_rows
from aligner.models.gpt.role.offload import ModelOffload
from aligner_plan.dry.device import DryDevice

FEW, MANY = 6, 14


def per_token(graphs=True, **case):
    """Launches, host reads and products of one decoding step; dtype of the logits drawn from.

    And of whole rollouts: bytes on the device more than before.
    """
    case = {"role": "actor", "trained": False, "precision": "bf16", **case}
    dtypes = set()
    plain = incremental.IncrementalModel.logits

    def logits(model, hidden):
        found = plain(model, hidden)
        dtypes.add(str(found.dtype))
        return found

    incremental.IncrementalModel.logits = logits
    with DryDevice(case.get("world", 1)) as device:
        role = build(case)
        role.settings = dataclasses.replace(role.settings, cuda_graphs=graphs)
        batch, _ = share_of_batch(case, role.parallel.dp_rank, role.parallel.dp_size)
        records = []
        before = device.memory.alive_bytes
        for length in (FEW, MANY):
            sampling = settings_of(case).sampling_params
            role.configure_generation(LengthParams(max_length=length), sampling, ROWS)
            with device.record() as record:
                rollout(role, batch)
            records.append(record)
        role.release_generator()
        gc.collect()
        left = device.memory.alive_bytes - before
    few, many = records
    steps = MANY - FEW
    flops = {str(d): (many.flops[d] - few.flops[d]) / steps for d in many.flops}
    return {
        "launches": (many.launches - few.launches) / steps,
        "kernels": (sum(many.kernels.values()) - sum(few.kernels.values())) / steps,
        "host_reads": (many.host_reads - few.host_reads) / steps,
        "flops": {name: n for name, n in flops.items() if n},
        "logits": sorted(dtypes),
        "left_bytes": left,
    }


def rollouts(streamed=False, moved=False, **case):
    """Captures so far, and launches and waits, after each of four rollouts; the last of few rows.

    Between the second and the third is an update. ``moved``: weights were away meanwhile.
    """
    case = {"role": "actor", "precision": "bf16", **case}
    found = []
    with DryDevice() as device:
        role = build(case)
        batch, passes = share_of_batch(case, 0, 1)
        role.configure_generation(
            LengthParams(max_length=MANY), settings_of(case).sampling_params, ROWS
        )
        role.setup_training()
        role.loss_fn = PPOPolicyLoss()
        heard = []
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
            listener = (lambda *token: heard.append(token)) if streamed else None
            with device.record() as record:
                rollout(role, {"input_ids": batch["input_ids"][:rows]}, listener)
            found.append([device.capturing.count, record.launches, record.host_reads])
    return {"rollouts": found, "heard": len(heard)}


def captured_against_the_rules():
    """What a graph cannot hold is refused; what it can is one launch, and is run each time."""
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
    """Most bytes on the device in grouped-query attention with a window, forward and backward."""
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
    """How many logits are sorted at a time for top-p, of a vocabulary of Qwen's size."""
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
