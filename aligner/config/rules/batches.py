"""Rules by which rows become batches and micro-batches.

A size that is not given follows from the others; sizes that do not divide are refused.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from aligner.config.roles.model import TrainedModelConfig
from aligner.config.run import BaseRunConfig, RSRunConfig, RunConfig, SupervisedRunConfig
from aligner.errors import ConfigError

LARGEST_BATCH, LARGEST_KEPT_BATCH = 64, 16  # of global batches that nobody gave
LARGEST_MICRO_BATCH = 8  # likewise

Root = TypeVar("Root", bound=BaseRunConfig)


def derive_batches(config: Root, values: Mapping[str, Any]) -> Root:
    """``config`` with batch sizes that are null in ``values`` worked out from the others.

    A global batch is what a step learns from, in equal parts of no more than 64 samples; it never
    depends on the layout. A micro-batch is the largest number up to 8 that the shares of the
    data-parallel ranks divide by. Where nothing fits, the usual sizes stay and the checks speak.
    """
    model = _with_batches(config, "model", values, config.trainer.world_size)
    config = replace(config, model=model)
    if isinstance(config, RunConfig) and config.critic is not None:
        critic = _with_batches(config, "critic", values, config.value_world_size)
        config = replace(config, critic=critic)
    return config


def _with_batches(
    config: BaseRunConfig, role: str, values: Mapping[str, Any], world_size: int
) -> Any:
    section, given = getattr(config, role), values.get(role) or {}
    rows = config.rows_per_example if isinstance(config, SupervisedRunConfig) else 1
    if given.get("global_batch_size") is None:
        batch = _global_batch(config) or section.global_batch_size
        section = replace(section, global_batch_size=batch)
    if given.get("micro_batch_size") is None:
        layout = config.value_parallel if role == "critic" else config.model.parallel
        ranks = max(1, layout.data_size(world_size))
        share, rest = divmod(section.global_batch_size, ranks)
        sizes = range(min(LARGEST_MICRO_BATCH, share), 0, -1)
        fitting = [] if rest else [n for n in sizes if share % n == 0 and n % rows == 0]
        section = replace(section, micro_batch_size=(*fitting, section.micro_batch_size)[0])
    return section


def _global_batch(config: BaseRunConfig) -> int | None:
    """The samples a step learns from in the fewest equal parts; None: there is no such number."""
    if isinstance(config, RSRunConfig):
        rs = config.model.rs
        learned = rs.num_rollout_samples // rs.num_rollouts_per_prompt * rs.top_n_rollouts
        largest = LARGEST_KEPT_BATCH
    elif isinstance(config, RunConfig):
        learned, largest = config.model.ppo.num_rollout_samples, LARGEST_BATCH
    else:
        return None
    fewest = -(-learned // largest)
    # No more than twice as many: a prime number of samples is not learned one by one.
    for parts in range(fewest, 2 * fewest + 1):
        if learned % parts == 0:
            return learned // parts
    return None


def check_shares(
    role: str, global_batch_size: int, micro_batch_size: int, data_parallel_size: int
) -> None:
    """Refuse a global batch that the data-parallel ranks cannot share evenly.

    ``role``: the configuration's section.
    """
    per_pass = micro_batch_size * data_parallel_size
    if global_batch_size % per_pass:
        processes = "trainer.devices x trainer.num_nodes"
        if role == "critic":
            processes += ", or of cluster.value_workers"
        ranks = f" (of {processes})" if data_parallel_size > 1 else ""
        raise ConfigError(
            f"{role}.global_batch_size={global_batch_size} is not a multiple of "
            f"{role}.micro_batch_size={micro_batch_size} x {data_parallel_size} "
            f"data-parallel ranks = {per_pass}{ranks}; nearest that work: "
            f"{multiples_near(global_batch_size, per_pass)}"
        )


def check_rows_together(model: TrainedModelConfig, rows: int) -> None:
    """Refuse batches that cut through examples of ``rows`` adjacent rows."""
    for key in ("micro_batch_size", "global_batch_size"):
        size = getattr(model, key)
        if size % rows:
            raise ConfigError(
                f"model.{key}={size} counts rows, and an example of this run has {rows}, the "
                f"chosen and the rejected response; nearest that work: "
                f"{multiples_near(size, rows)}"
            )


def check_token_budgets(model: TrainedModelConfig) -> None:
    """Refuse two ways at once, and budgets that the layout cannot cut."""
    if model.sequence_packing.enabled and model.dynamic_batching.enabled:
        raise ConfigError(
            "model.sequence_packing.enabled=true and model.dynamic_batching.enabled=true exclude "
            "each other; set one of them to false (packing wastes less)"
        )
    parallel = model.parallel
    multiple = math.lcm(
        parallel.sequence_multiple,
        parallel.context * parallel.row_multiple(model.sequence_length_round),
    )
    for key, tokens in token_budgets(model).items():
        if tokens % multiple:
            raise ConfigError(
                f"{key}={tokens} does not divide by {multiple}, which "
                f"model.context_parallel_size={parallel.context}, "
                f"model.tensor_model_parallel_size={parallel.tensor} with "
                f"model.sequence_parallel={str(parallel.sequence_parallel).lower()} and lengths "
                f"in multiples of {model.sequence_length_round} need; nearest that work: "
                f"{multiples_near(tokens, multiple)}"
            )


def length_multiple(model: TrainedModelConfig) -> int:
    """Lengths are rounded up to a multiple of it before they are counted against a budget."""
    if model.sequence_packing.enabled:
        return model.parallel.sequence_multiple
    if model.dynamic_batching.enabled:
        return model.parallel.row_multiple(model.sequence_length_round)
    return 1


def token_budgets(model: TrainedModelConfig) -> dict[str, int]:
    """The token budgets in force, by key."""
    name = "sequence_packing" if model.sequence_packing.enabled else "dynamic_batching"
    budgets = model.token_budgets
    if budgets is None:
        return {}
    found = {"train_mb_tokens": budgets.train_mb_tokens}
    if budgets.logprob_mb_tokens is not None:
        found["logprob_mb_tokens"] = budgets.logprob_mb_tokens
    return {f"model.{name}.{key}": tokens for key, tokens in found.items()}


def multiples_near(number: int, step: int) -> str:
    """The multiples of ``step`` around ``number``, in words."""
    below, above = number // step * step, -(-number // step) * step
    return f"{below} or {above}" if below else str(above)
