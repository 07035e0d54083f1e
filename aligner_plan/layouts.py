"""Candidates of a search: layouts, memory-saving options, and sizes of micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from aligner.config import BaseRunConfig, RunConfig, SamplingRunConfig
from aligner.config.commands.changes import RECOMPUTE
from aligner.errors import ConfigError, DataError, LayoutError
from aligner_plan.estimate import Estimator
from aligner_plan.options import varied

_PIPELINES = (1, 2, 4, 8, 16)
_STAGED = 2  # number of pipeline sizes above 1 that are tried
_SIZES = (1, 2, 4, 8)  # of tensor, context and expert parallelism
_CHUNK = 4096  # least tokens of a sequence on a context-parallel rank


@dataclass(frozen=True)
class Layout:
    """A layout as changes of the configuration, and a lower bound of the seconds of a step."""

    changes: dict[str, Any]
    least_seconds: float

    @property
    def has_stages(self) -> bool:
        """True if pipeline stages wait for each other."""
        return bool(self.changes["model.pipeline_model_parallel_size"] > 1)


def layouts(estimator: Estimator, config: BaseRunConfig) -> list[Layout]:
    """List the layouts that the configuration permits and that may fit, the fastest first.

    Larger pipelines are tried until two sizes may fit. Context parallelism is tried for long
    sequences, expert parallelism for models with experts.
    """
    candidates: list[Layout] = []
    staged = 0
    for pipeline in _PIPELINES:
        fitting = []
        for changes in _grid(estimator, config, pipeline):
            saving = dict(list(savings(config, 1))[-1][1])
            try:
                bounds = estimator.lower_bounds(varied(config, {**changes, **saving}))
            except (ConfigError, LayoutError, DataError):
                continue
            if bounds.card_bytes <= estimator.usable_bytes:
                fitting.append(Layout(changes, bounds.step_seconds))
        candidates += fitting
        staged += bool(fitting) and pipeline > 1
        if staged == _STAGED:
            break
    return sorted(candidates, key=lambda layout: layout.least_seconds)


def _grid(estimator: Estimator, config: BaseRunConfig, pipeline: int) -> Iterator[dict[str, Any]]:
    experts = estimator.architecture(config).num_moe_experts or 1
    longest = estimator.longest(config)
    for tensor, context, expert in product(_SIZES, repeat=3):
        if expert > experts or (context > 1 and longest < context * _CHUNK):
            continue
        changes: dict[str, Any] = {
            "model.tensor_model_parallel_size": tensor,
            "model.pipeline_model_parallel_size": pipeline,
        }
        if longest >= 2 * _CHUNK:
            changes["model.context_parallel_size"] = context
        if experts > 1:
            changes["model.expert_model_parallel_size"] = expert
        changes["model.sequence_parallel"] = tensor > 1 and config.policy.backend == "megatron"
        changes["model.micro_batch_size"] = None
        if _has_critic(config):
            changes["critic.micro_batch_size"] = None
        yield changes


def savings(config: BaseRunConfig, sizes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield options that save memory in the order of their cost, beginning with none.

    Each has an index in `batch_sizes`, which has ``sizes`` entries: the first, then the last.
    """
    offload: dict[str, Any] = {}
    if isinstance(config, SamplingRunConfig):
        rollout = config.model.rollout_key
        offload[f"{rollout}.offload_adam_states"] = True
        if config.policy.backend == "megatron":
            offload[f"{rollout}.offload_gradients"] = True
        if _has_critic(config):
            offload |= {"critic.offload_weights": True, "critic.offload_adam_states": True}
            offload[f"{rollout}.offload_weights"] = True
    steps: list[dict[str, Any]] = [{RECOMPUTE: None}]
    for granularity in ("selective", "full"):
        steps.append({RECOMPUTE: granularity})
        if offload:
            steps.append({RECOMPUTE: granularity, **offload})
    for step in steps:
        for index in sorted({0, sizes - 1}):
            yield index, step


def batch_sizes(
    estimator: Estimator, config: BaseRunConfig, layout: Layout
) -> list[dict[str, Any]]:
    """List sizes of update micro-batches, halved from one to the next. The last is one sequence."""
    try:
        model = varied(config, layout.changes).model
    except (ConfigError, LayoutError, DataError):
        return [{}]
    budgets = model.token_budgets
    sizes: list[dict[str, Any]] = []
    if budgets is not None:
        name = "sequence_packing" if model.sequence_packing.enabled is True else "dynamic_batching"
        scored = budgets.logprob_mb_tokens or budgets.train_mb_tokens
        tokens, longest = budgets.train_mb_tokens, estimator.longest(config)
        while tokens >= longest:
            sizes.append(
                {f"model.{name}.train_mb_tokens": tokens, f"model.{name}.logprob_mb_tokens": scored}
            )
            tokens //= 2
        return sizes or [{}]
    rows = model.micro_batch_size
    while rows >= 1:
        critic = {"critic.micro_batch_size": rows} if _has_critic(config) else {}
        sizes.append({"model.micro_batch_size": rows, **critic})
        rows //= 2
    return sizes


def _has_critic(config: BaseRunConfig) -> bool:
    return isinstance(config, RunConfig) and config.critic is not None
