"""Length of a run, counted in samples whatever the batch sizes of its parts."""

import copy
from dataclasses import dataclass
from typing import Any

from aligner.algorithms.run.directory import log_dir
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import BaseRunConfig, LoopConfig
from aligner.data.dataset import PromptSampler
from aligner.distributed.collectives import on_rank_zero
from aligner.errors import DamagedStateError


def total_steps(config: BaseRunConfig, sampler: PromptSampler) -> int:
    """Steps of the run: ``max_epochs`` worth of data, ``max_steps`` at most.

    The end is counted in samples: a run that goes on with batches of another size makes, after the
    steps of its newest run state, as many as the rest of its data fills.
    """
    loop = config.loop
    position = on_rank_zero(lambda: _saved_position(config))
    if position is None:
        steps = sampler.batches_in(loop.max_epochs)
    elif position.is_continued_by(loop, sampler):
        return position.total_steps
    else:
        left = copy.copy(sampler)
        left.load_state_dict(position.sampler)
        steps = position.step + position.begun + left.batches_left(loop.max_epochs)
    return steps if loop.max_steps < 0 else min(loop.max_steps, steps)


@dataclass(frozen=True)
class _Position:
    """What a run state tells of the length of its run."""

    step: int
    begun: int  # rollouts whose prompts are drawn and not learned from
    sampler: dict[str, Any]
    limits: tuple[int, int]  # ``max_epochs`` and ``max_steps``
    total_steps: int  # -1: an earlier version wrote it

    def is_continued_by(self, loop: LoopConfig, sampler: PromptSampler) -> bool:
        """Return whether the length is the saved run's: neither its limits nor batches changed."""
        same_size = self.sampler.get("batch_size") == sampler.batch_size
        same_limits = self.limits == (loop.max_epochs, loop.max_steps)
        return self.total_steps >= 0 and same_size and same_limits


def _saved_position(config: BaseRunConfig) -> _Position | None:
    """Position in the newest run state that can be read; None: the run begins."""
    store = RunStateStore(log_dir(config) / "run_state")
    for saved in reversed(store.states()):
        try:
            state = store.load(saved.path).state
            learner, loop = state["learner"], state["config"]["trainer"][config.section[8:]]
            return _Position(
                saved.step,
                int(learner.get("rollouts", {}).get("indices") is not None),
                learner["sampler"],
                (loop["max_epochs"], loop["max_steps"]),
                state.get("total_steps", -1),
            )
        except (DamagedStateError, KeyError):  # reported where it is restored
            continue
    return None
