"""Length of a run, counted in samples whatever the batch sizes of its parts."""

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
    """Steps of the run: ``max_epochs`` worth of data, ``max_steps`` at most.

    The end is counted in samples: a run that goes on with batches of another size makes, after the
    steps of its newest run state, as many as the rest of its data fills.
    """
    loop = config.loop
    steps, saved = sampler.batches_in(loop.max_epochs), on_rank_zero(lambda: _newest(config))
    if saved is not None:
        before = saved["limits"]
        if before == [loop.max_epochs, loop.max_steps, sampler.batch_size, sampler.size]:
            return int(saved["total_steps"])
        left = copy.copy(sampler)
        left.load_state_dict(saved["sampler"])
        steps = saved["steps"] + left.batches_left(loop.max_epochs)
    return steps if loop.max_steps < 0 else min(loop.max_steps, steps)


def _newest(config: BaseRunConfig) -> dict[str, Any] | None:
    """Length and position in the newest readable run state; None: the run begins.

    ``steps``: those that are made or whose rollout is begun.
    """
    store = RunStateStore(log_dir(config) / "run_state")
    for saved in reversed(store.states()):
        try:
            state = store.load(saved.path).state
            learner, loop = state["learner"], flat(state["config"])
            begun = learner.get("rollouts", {}).get("indices") is not None
            limits = [loop[f"{config.section}.{name}"] for name in ("max_epochs", "max_steps")]
            # Of a state that an earlier version wrote, no batch size is known.
            limits += [learner["sampler"].get(name) for name in ("batch_size", "size")]
            return {
                "steps": saved.step + begun,
                "sampler": learner["sampler"],
                "total_steps": state.get("total_steps"),
                "limits": limits,
            }
        except (DamagedStateError, KeyError):  # reported where it is restored
            continue
    return None
