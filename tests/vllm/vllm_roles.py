"""Configurations, roles and batches of the tests against vLLM."""

import contextlib
import dataclasses
from pathlib import Path

import torch

from aligner.checkpoint.model_source import open_model
from aligner.config import parse_config
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE

ROOT = Path(__file__).parents[2]
# vLLM's attention on CPU wants heads of 32 numbers or more; the tiny model's have 8.
WIDE = dataclasses.replace(
    TINY_ARCHITECTURE, num_attention_heads=4, num_query_groups=2, kv_channels=32
)


def run_config(path, *, model=None, ppo=None, generation=None, vllm=None, **sections):
    """A run on Ray with one engine of one thread."""
    values = {
        "model": {
            "restore_from_path": str(path),
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "optim": {"lr": 3.0e-2},
            "ppo": {"num_rollout_samples": 8, "rollout_micro_batch_size": 16, **(ppo or {})},
            **(model or {}),
        },
        "critic": {"micro_batch_size": 4, "global_batch_size": 8},
        "reward": {"function": "a:b"},
        "data": {"train": {"source": "x.jsonl"}},
        "cluster": {"engine": "ray"},
        "generation": {
            "backend": "vllm",
            "vllm": {
                "python": str(ROOT / ".venv-vllm/bin/python"),
                "kv_cache_mb": 128,
                "threads": 1,
                **(vllm or {}),
            },
            **(generation or {}),
        },
        **sections,
    }
    return parse_config(values)


@contextlib.contextmanager
def roles(config, *, backend="megatron", workers=1):
    """A policy and a `VllmGeneration` on it, on a cluster of their own."""
    from aligner.distributed.virtual_cluster import RayVirtualCluster
    from aligner.generation.vllm.generation import VllmGeneration
    from aligner.models.policy.lm_policy import Policy

    with open_model(config.model.restore_from_path, backend) as checkpoint:
        tokenizer, architecture = checkpoint.tokenizer, checkpoint.architecture
    cluster = RayVirtualCluster(
        [max(workers, config.generation.vllm.workers)],
        use_gpus=False,
        max_colocated_worker_groups=2,
        parallel=config.model.parallel,
        timeout_s=240.0,
    )
    try:
        policy = Policy(
            cluster, config.model, tokenizer, backend=backend, init_reference_model=False
        )
        yield policy, VllmGeneration(cluster, config, tokenizer, architecture, policy, 256)
    finally:
        cluster.shutdown()


def prompts(rows=12, first=0):
    lengths = torch.tensor([3 + row % 4 for row in range(rows)])
    ids = torch.zeros(rows, 6, dtype=torch.int64)
    for row, length in enumerate(lengths.tolist()):
        ids[row, :length] = 32 + (torch.arange(length) * 7 + 3 * row + first) % 90
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": lengths, "sample_ids": torch.arange(rows) + first}
    )


def scored(output):
    """Columns that `Policy.get_logprobs` reads, of a rollout."""
    width = output["output_ids"].shape[1]
    ends = output["unpadded_sequence_lengths"][:, None]
    starts = ends - output["generation_lengths"][:, None]
    position = torch.arange(width)
    return BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": ends[:, 0],
            "token_mask": ((position >= starts) & (position < ends)).float(),
        }
    )
