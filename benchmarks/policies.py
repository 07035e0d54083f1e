"""Common parts of `packing` and `shared_prefix`: policies that take turns in one process."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aligner.config import ModelConfig, OptimConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.workers import LocalCluster
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.groups import initialize_parallel, shutdown_parallel
from benchmarks.common import stdout_reserved


def make_policy(model: Path, backend: str = "megatron", **section: Any) -> Policy:
    """Return a trainable policy without reference. ``section``: keys of ``model``."""
    config = ModelConfig(restore_from_path=str(model), optim=OptimConfig(lr=1e-6), **section)
    cluster = LocalCluster(initialize_parallel(config.parallel))
    policy = Policy(
        cluster, config, byte_level_tokenizer(), backend=backend, init_reference_model=False
    )
    policy.prepare_for_training()
    return policy


def run(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    *,
    micro_batch: int,
    repeats: int,
) -> dict[str, Any]:
    """Add the common options (with these defaults), measure, print the result as a JSON line."""
    parser.add_argument("--micro-batch", type=int, default=micro_batch, help="rows")
    parser.add_argument("--repeats", type=int, default=repeats, help="of every pair")
    parser.add_argument("--threads", type=int, default=None, help="default: torch's own choice")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with stdout_reserved():
        result = measure(options)
        shutdown_parallel()
    print(json.dumps(result))
    return result
