"""One process for all dry cases: `python dry_worker.py RESULTS CASE...`, a case as JSON.

Every case is one role, one layout and one way of batching: set-up, two updates, scoring, for an
actor a rollout of a few tokens, and the changes of phase between them.
"""

import json
import sys
import traceback
from pathlib import Path

from aligner.dry.guard import load_guard

load_guard()

import torch

from aligner.algorithms.losses.policy import PPOPolicyLoss
from aligner.algorithms.losses.reward import BradleyTerryLoss
from aligner.algorithms.losses.value import PPOValueLoss
from aligner.checkpoint.tiny import TINY_ARCHITECTURE
from aligner.config import LengthParams, LoraConfig, OptimConfig, ParallelConfig, SamplingParams
from aligner.data.byte_tokenizer import byte_level_tokenizer
from aligner.dry.device import DryDevice
from aligner.models.gpt import (
    MegatronGPTActorModel,
    MegatronGPTCriticModel,
    MegatronGPTRewardModel,
)
from aligner.models.gpt.settings import RoleSettings

TOKENIZER = byte_level_tokenizer()
ROWS, LENGTH, NEW_TOKENS = 8, 48, 4
ROLES = {
    "actor": (MegatronGPTActorModel, PPOPolicyLoss),
    "critic": (MegatronGPTCriticModel, PPOValueLoss),
    "reward": (MegatronGPTRewardModel, BradleyTerryLoss),
}


def batch():
    """On the device; rows of several lengths, micro-batches of one width."""
    lengths = LENGTH - torch.arange(ROWS) * 3
    lengths[ROWS // 2] = LENGTH
    inside = (torch.arange(LENGTH) < lengths[:, None]).float()
    floats = ("advantages", "returns", "values", "prev_logprobs", "generation_logprobs")
    columns = {
        "input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64),
        "input_lengths": lengths,
        "token_mask": inside * (torch.arange(LENGTH) >= 8),
        "sample_mask": torch.ones(ROWS),
        **{name: torch.zeros(ROWS, LENGTH) for name in floats},
    }
    return {name: column.to("cuda") for name, column in columns.items()}


def settings(case):
    parallel = ParallelConfig(
        tensor=case.get("tp", 1),
        pipeline=case.get("pp", 1),
        context=case.get("cp", 1),
        sequence_parallel=case.get("tp", 1) > 1,
    )
    return RoleSettings(
        parallel=parallel,
        precision=case.get("precision", "32"),
        recompute=case.get("recompute"),
        optim=OptimConfig(lr=1e-5),
        lora=LoraConfig(adapter_dim=4) if case.get("lora") else None,
        sequence_packing=case.get("packed", False),
        micro_batch_size=ROWS // 2,
        global_batch_size=ROWS * case.get("world", 1) // parallel.model_parallel_size,
        offload_adam_states=case.get("offload", False),
        length_params=LengthParams(max_length=NEW_TOKENS),
        sampling_params=SamplingParams(top_p=case.get("top_p", 1.0)),
        rollout_micro_batch_size=ROWS,
    )


def run(case):
    found = {}
    with DryDevice(case.get("world", 1), case.get("rank", 0)) as device:
        cls, loss = ROLES[case["role"]]
        role = cls(
            {"vocab_size": TINY_ARCHITECTURE.vocab_size},
            settings=settings(case),
            architecture=TINY_ARCHITECTURE,
            tokenizer=TOKENIZER,
            initialize=False,
        )
        data = batch()
        if case.get("untrained"):
            with device.record() as score:
                role.get_values(data)
            return {"scoring": facts(score)}
        before = device.memory.alive_bytes
        role.setup_training()
        role.loss_fn = loss()
        found["parameters"] = sum(each.numel() for each in role.gpt.parameters())
        for name in ("first", "update"):
            role.prepare_for_training()
            with device.record() as update:
                outcome = role.training_update(data)
            assert outcome["skipped"] == 0.0
            role.finish_training()
            found[name] = facts(update)
            device.holds(role.model)
        found["static_bytes"] = device.memory.alive_bytes - before
        role.prepare_for_inference()
        found["inference_bytes"] = device.memory.alive_bytes - before
        with device.record() as score:
            role.get_logprobs(data) if case["role"] == "actor" else role.get_values(data)
        found["scoring"] = facts(score)
        # Earlier pipeline stages are told what the last one drew, which nobody does here.
        if case["role"] == "actor" and role.parallel.is_last_stage:
            with device.record() as rollout:
                prompts = data["input_ids"][:, :8].contiguous()
                eight = torch.full((ROWS,), 8).to("cuda")
                role.generate(prompts, eight, torch.arange(ROWS).to("cuda"), seed=1)
            found["rollout"] = facts(rollout)
        role.finish_inference()
        with device.record() as back:
            role.prepare_for_training()
        found["back_copied_bytes"] = back.copied_bytes
        found["back_bytes"] = device.memory.alive_bytes - before
    return found


def shortened(trace):
    """Without PyTorch's list of every kernel that is registered."""
    return "\n".join(line for line in trace.splitlines() if " registered at " not in line)[-9000:]


def facts(record):
    return {
        "launches": record.launches,
        "host_reads": record.host_reads,
        "flops": {str(dtype).removeprefix("torch."): n for dtype, n in record.flops.items()},
        "peak_bytes": record.peak_bytes,
        "peak_at": record.peak_at,
        "kinds": {str(kind): n for kind, n in record.peak.kinds.items()},
        "copied_bytes": record.copied_bytes,
        "collectives": {f"{c.name}/{c.group_size}": n for c, n in record.collectives.items()},
    }


if __name__ == "__main__":
    results = []
    for text in sys.argv[2:]:
        try:
            results.append(run(json.loads(text)))
        except BaseException:  # the test shows it; other cases go on
            results.append({"error": shortened(traceback.format_exc())})
    Path(sys.argv[1]).write_text(json.dumps(results))
