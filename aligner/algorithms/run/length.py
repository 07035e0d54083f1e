"""Length of a run, counted in samples independently of batch sizes."""

import copy
from typing import Any

from aligner.algorithms.run.directory import log_dir
from aligner.algorithms.run.identity import flat
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import BaseRunConfig
from aligner.data.dataset import PromptSampler
from aligner.errors import DamagedStateError
from aligner.parallel.collectives import on_rank_zero


def total_steps(config: BaseRunConfig, sampler: PromptSampler) -> int:
    """Return the number of steps: ``max_epochs`` epochs of data, at most ``max_steps``.

    A run that continues with another batch size takes, after the steps of its newest run state, as
    many steps as its remaining data fills.
    """
    loop = config.loop
    steps, state = sampler.batches_in(loop.max_epochs), on_rank_zero(lambda: _newest(config))
    if state is not None:
        if state["limits"] == [loop.max_epochs, loop.max_steps, sampler.batch_size, sampler.size]:
            return int(state["total_steps"])
        saved_sampler = copy.copy(sampler)
        saved_sampler.load_state_dict(state["sampler"])
        steps = state["steps"] + saved_sampler.batches_left(loop.max_epochs)
    return steps if loop.max_steps < 0 else min(loop.max_steps, steps)


def _newest(config: BaseRunConfig) -> dict[str, Any] | None:
    """Return length and position of the newest readable run state, or None without a state.

    ``steps`` counts finished steps and a step whose rollout has begun.
    """
    store = RunStateStore(log_dir(config) / "run_state")
    for saved in reversed(store.states()):
        try:
            state = store.load(saved.path).state
            learner, loop = state["learner"], flat(state["config"])
            has_rollout = learner.get("rollouts", {}).get("indices") is not None
            limits = [loop[f"{config.section}.{name}"] for name in ("max_epochs", "max_steps")]
            # States of earlier versions lack the batch size.
            limits += [learner["sampler"].get(name) for name in ("batch_size", "size")]
            return {
                "steps": saved.step + has_rollout,
                "sampler": learner["sampler"],
                "total_steps": state.get("total_steps"),
                "limits": limits,
            }
        except (DamagedStateError, KeyError):  # the restore reports the error
            continue
    return None
