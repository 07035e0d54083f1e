"""Single changes of a configuration that affect the memory or the speed of a run."""

from collections.abc import Iterator, Mapping
from typing import Any

from aligner.config.run import BaseRunConfig, RunConfig, SamplingRunConfig
from aligner.foreign_keys import shown

RECOMPUTE = "model.activations_checkpoint_granularity"
TENSOR = "model.tensor_model_parallel_size"
_GRANULARITIES = (None, "selective", "full")  # in order of decreasing memory


def overrides_of(changes: Mapping[str, Any]) -> list[str]:
    """Return changed keys as command-line arguments ``key=value``."""
    return [f"{key}={shown(value)}" for key, value in changes.items()]


def single_changes(config: BaseRunConfig, *, saving: bool = False) -> Iterator[dict[str, Any]]:
    """Yield alternatives to ``config`` that may be faster or use less memory.

    Each alternative is a dict of dotted keys and new values. ``saving``: yield only alternatives
    that use less device memory.
    """
    # Recomputation of activations. Later granularities use less memory.
    model = config.model
    current = _GRANULARITIES.index(model.activations_checkpoint_granularity)
    for index, granularity in enumerate(_GRANULARITIES):
        if index > current or (index < current and not saving):
            yield {RECOMPUTE: granularity}

    # Size of a micro-batch, by tokens or by sequences.
    budgets = model.token_budgets
    section = "sequence_packing" if model.sequence_packing.enabled is True else "dynamic_batching"
    for factor in (0.5,) if saving else (0.5, 2):
        if budgets is not None:
            yield {f"model.{section}.train_mb_tokens": int(budgets.train_mb_tokens * factor)}
        elif model.micro_batch_size * factor >= 1:
            yield {
                f"{key}.micro_batch_size": max(1, int(role.micro_batch_size * factor))
                for key, role in config.trained_roles.items()
            }

    # Storage of states and weights in host memory.
    critic = config.critic
    if isinstance(config, SamplingRunConfig) and not model.rollout.offload_adam_states:
        yield {f"{model.rollout_key}.offload_adam_states": True}
    if critic is not None and not critic.offload_weights:
        yield {"critic.offload_weights": True, "critic.offload_adam_states": True}
    if critic is not None and not model.rollout.offload_weights:
        yield {f"{model.rollout_key}.offload_weights": True}
    if isinstance(config, RunConfig) and config.model.reference.mode == "keep":
        yield {"model.reference.mode": "swap"}

    # Layout and precision. Larger tensor-parallel groups come last, within a node.
    if model.tensor_model_parallel_size > 1 and not model.sequence_parallel:
        yield {"model.sequence_parallel": True}
    if not saving and config.trainer.precision == "32":
        yield {"trainer.precision": "bf16"}
    is_megatron = config.policy.backend == "megatron"
    tensor_size = 2 * model.tensor_model_parallel_size
    while not saving and tensor_size <= config.trainer.devices:
        yield {TENSOR: tensor_size, **({"model.sequence_parallel": True} if is_megatron else {})}
        tensor_size *= 2
