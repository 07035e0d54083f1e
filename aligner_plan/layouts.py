"""Candidates of a search: layouts, memory-saving options, and sizes of micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aligner.config import BaseRunConfig, RunConfig, SamplingRunConfig
from aligner.config.commands.changes import RECOMPUTE
from aligner.config.commands.plan import PER_NODE, varied
from aligner.errors import ConfigError, DataError, LayoutError
from aligner_plan.estimate import Estimator

_PIPELINES = (1, 2, 4, 8, 16)
_STAGED = 2  # sizes of pipelines that are tried, beside none
_SIZES = (1, 2, 4, 8)  # of tensor, context and expert parallelism
_CHUNK = 4096  # tokens of a sequence that a context-parallel rank has at least


@dataclass(frozen=True)
class Layout:
    """Sizes, as changes of the configuration, and seconds that a step takes at least."""

    changes: dict[str, Any]
    least_seconds: float

    @property
    def has_stages(self) -> bool:
        """True if pipeline stages wait for each other."""
        return bool(self.changes["model.pipeline_model_parallel_size"] > 1)


def layouts(estimator: Estimator, config: BaseRunConfig) -> list[Layout]:
    """Layouts that the configuration permits, and that may hold the run, the fastest first.

    Pipeline stages come where a node's tensor parallelism is not enough, context parallelism where
    sequences are long, expert parallelism where there are experts.
    """
    found: list[Layout] = []
    staged = 0
    for pipeline in _PIPELINES:
        some = []
        for changes in _grid(estimator, config, pipeline):
            saving = dict(list(savings(config, 1))[-1][1])
            try:
                least = estimator.least(varied(config, {**changes, **saving}))
            except (ConfigError, LayoutError, DataError):
                continue
            if least.card_bytes <= estimator.usable_bytes:
                some.append(Layout(changes, least.step_seconds))
        found += some
        staged += bool(some) and pipeline > 1
        if staged == _STAGED:
            break
    return sorted(found, key=lambda layout: layout.least_seconds)


def _grid(estimator: Estimator, config: BaseRunConfig, pipeline: int) -> Iterator[dict[str, Any]]:
    experts = estimator.architecture(config).num_moe_experts or 1
    longest = estimator.longest(config)
    megatron = config.policy.backend == "megatron"
    has_critic = isinstance(config, RunConfig) and config.critic is not None
    for tensor in _SIZES:
        for context in _SIZES:
            if tensor > PER_NODE or (context > 1 and longest < context * _CHUNK):
                continue
            for expert in _SIZES:
                if expert > experts:
                    continue
                yield {
                    "model.tensor_model_parallel_size": tensor,
                    "model.pipeline_model_parallel_size": pipeline,
                    **({"model.context_parallel_size": context} if longest >= 2 * _CHUNK else {}),
                    **({"model.expert_model_parallel_size": expert} if experts > 1 else {}),
                    "model.sequence_parallel": tensor > 1 and megatron,
                    "model.micro_batch_size": None,
                    **({"critic.micro_batch_size": None} if has_critic else {}),
                }


def savings(config: BaseRunConfig, sizes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """No option, then those that save memory, in the order of their cost.

    Beside each the place in `batch_sizes`, which has ``sizes`` entries: the first, or the last.
    """
    offload: dict[str, Any] = {}
    if isinstance(config, SamplingRunConfig):
        offload[f"{config.model.rollout_key}.offload_adam_states"] = True
        if config.policy.backend == "megatron":
            offload[f"{config.model.rollout_key}.offload_gradients"] = True
    if isinstance(config, RunConfig) and config.critic is not None:
        offload |= {"critic.offload_weights": True, "critic.offload_adam_states": True}
        offload[f"{config.model.rollout_key}.offload_weights"] = True
    steps: list[dict[str, Any]] = [{RECOMPUTE: None}, {RECOMPUTE: "selective"}]
    steps += [{RECOMPUTE: "selective", **offload}] if offload else []
    steps += [{RECOMPUTE: "full"}]
    steps += [{RECOMPUTE: "full", **offload}] if offload else []
    for step in steps:
        for place in sorted({0, sizes - 1}):
            yield place, step


def batch_sizes(
    estimator: Estimator, config: BaseRunConfig, layout: Layout
) -> list[dict[str, Any]]:
    """Micro-batches of updates, each half as large as the one before, the last one sequence."""
    try:
        model = varied(config, layout.changes).model
    except (ConfigError, LayoutError, DataError):
        return [{}]
    budgets = model.token_budgets
    found: list[dict[str, Any]] = []
    if budgets is not None:
        name = "sequence_packing" if model.sequence_packing.enabled else "dynamic_batching"
        tokens, least = budgets.train_mb_tokens, estimator.longest(config)
        while tokens >= least:
            scored = budgets.logprob_mb_tokens or budgets.train_mb_tokens
            section = f"model.{name}"
            found.append(
                {f"{section}.train_mb_tokens": tokens, f"{section}.logprob_mb_tokens": scored}
            )
            tokens //= 2
        return found or [{}]
    has_critic = isinstance(config, RunConfig) and config.critic is not None
    size = model.micro_batch_size
    while size >= 1:
        critic = {"critic.micro_batch_size": size} if has_critic else {}
        found.append({"model.micro_batch_size": size, **critic})
        size //= 2
    return found
