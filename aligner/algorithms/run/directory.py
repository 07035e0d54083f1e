"""The directory of a run: a command continues the run in it, refuses to, or moves its files away.

``run.json`` and every run state identify the run of a directory (`RunIdentity`). No file of an
earlier run is deleted: all files move to ``earlier_001/``, ``earlier_002/`` and so on.
"""

import copy
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from aligner.algorithms.run.identity import RunIdentity, flat
from aligner.checkpoint.durable import atomic_file, storing, sync_path
from aligner.checkpoint.run_state.store import RunStateStore, SavedState
from aligner.config import BaseRunConfig, SamplingRunConfig, SupervisedRunConfig
from aligner.config.parse import defaults_of
from aligner.data.batches import PromptSampler
from aligner.data.dataset import Dataset
from aligner.errors import CheckpointError, ConfigError, DamagedStateError
from aligner.observe.jsonl import read_lines
from aligner.observe.run_lock import LOCK_FILE, RUN_FILE
from aligner.parallel.collectives import on_rank_zero

_HISTORY = ("metrics.jsonl", "samples.jsonl")
# All files of a run in its directory. Other files there belong to the user and are not moved.
_RUN_FILES = (
    *(RUN_FILE, "run_state", *_HISTORY, "report.html", "tensorboard", "wandb", "wandb_id"),
    *("nonfinite", "workers", "reference_logprobs.pt"),
    *("policy.nemo", "policy.lora.safetensors"),
    *("reward_model.nemo", "reward_model.lora.safetensors"),
)


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a run, on the process that writes its files."""

    folder: Path
    store: RunStateStore

    def prepare(self, identity: RunIdentity, config: BaseRunConfig) -> list[str]:
        """Check that the locked directory is empty or contains this run. Return notes to print.

        Raises:
            ConfigError: the directory contains another run, or any run if
                ``exp_manager.resume_if_exists`` is false.
            CheckpointError: the directory contains this run, but no state to continue from.
            StorageError: the directory cannot be written.
        """
        exp, moved_to, start_time = config.exp_manager, None, None
        # With ``start_anew``, move the files of an earlier run away.
        if exp.start_anew:
            moved_to, reason = set_aside(self.folder), "exp_manager.start_anew=true"
        # Read run states, logs and ``run.json``. ``last``: last step in the logs, -1 without logs.
        self.store.recover()
        states, damaged = self.store.survey()
        record, last = self._record(), self._last_logged_step()
        # Without ``resume_if_exists``, refuse any run.
        if not exp.resume_if_exists and (states or damaged or last >= 0):
            newest = damaged[-1] if damaged and last < 0 else f"metrics up to step {last}"
            newest = states[-1].path.name if states else newest
            raise ConfigError(
                f"exp_manager.resume_if_exists=false, but {self.folder} contains a run (newest: "
                f"{newest}). Set the key to true to continue the run, or {self._remedy()}"
            )
        # Continue this run from its newest state. Without any state, refuse if steps would be lost.
        if states:
            start_time = self._check_same(identity, config)
        elif damaged:
            raise CheckpointError(
                f"no run state in {self.store.root} can be read: {', '.join(damaged)}. Copy one "
                f"back from a backup, or {self._remedy()}"
            )
        elif last > 0 and record.get("saved", True):
            raise CheckpointError(
                f"{self.folder} contains metrics of a run up to step {last}, but no run state to "
                f"continue from. Copy {self.store.root.name}/ back, or {self._remedy()}"
            )
        elif last > 0 or (last == 0 and record.get("identity") != identity.as_dict()):
            # The earlier run ended before its first save. Step 0 is the validation before training.
            moved_to, reason = set_aside(self.folder), "no run state had been saved"
        start_time = start_time or self.start_time or datetime.now().isoformat()
        self._write({"identity": identity.as_dict(), "saved": bool(states), "began": start_time})
        return [f"{reason}: the files of an earlier run are in {moved_to}"] if moved_to else []

    @property
    def start_time(self) -> str | None:
        """Local time at which the run started, in ISO format, or None if unknown."""
        return self._record().get("began")

    def mark_saved(self) -> None:
        """Record in ``run.json`` that a run state was saved. `prepare` reports a later loss."""
        record = self._record()
        if not record.get("saved"):
            self._write({**record, "saved": True})

    def remove_if_unused(self) -> None:
        """Remove the directory if it contains no other files than ``run.json`` and the lock."""
        with suppress(OSError):  # an error here must not replace the error that ended the run
            files = {path.name for path in self.folder.iterdir()}
            if files <= {LOCK_FILE, RUN_FILE}:
                for name in files:
                    (self.folder / name).unlink()
                self.folder.rmdir()

    def _last_logged_step(self) -> int:
        """Return the last step in the logs, or -1 if they are empty."""
        steps = [-1]
        for path in (self.folder / name for name in _HISTORY):
            with storing(path):
                steps += [line["step"] for line in read_lines(path)]
        return max(steps)

    def _check_same(self, identity: RunIdentity, config: BaseRunConfig) -> str | None:
        """Return the run's start time. Raise if the newest readable state is from another run."""
        exp = config.exp_manager
        for saved, state in _readable_states(self.store):
            saved_identity, defaults = RunIdentity.saved(state), defaults_of(config)
            may_differ = (exp.accept_changed, exp.resume_changed)
            if reasons := identity.refusals(saved_identity, *may_differ, defaults):
                raise ConfigError(
                    f"{self.folder} contains another run ({saved.path.name}): "
                    f"{', '.join(reasons)}. To keep that run, {self._remedy()}"
                )
            return state.get("began")
        return None

    def _remedy(self) -> str:
        return (
            "set exp_manager.explicit_log_dir to another directory, or start a new run here with "
            f"exp_manager.start_anew=true (earlier files move to {_next_earlier(self.folder)})"
        )

    def _record(self) -> dict[str, Any]:
        try:
            record = json.loads((self.folder / RUN_FILE).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def _write(self, record: Mapping[str, Any]) -> None:
        with atomic_file(self.folder / RUN_FILE) as file:
            file.write((json.dumps(record, indent=1) + "\n").encode())


def set_aside(folder: Path) -> Path | None:
    """Move a run's files to a new subdirectory. Return its path, or None if there are no files."""
    paths = [folder / name for name in _RUN_FILES if (folder / name).exists()]
    paths = [path for path in paths if path.is_dir() or path.stat().st_size > 0]
    if not paths:
        return None
    # Renaming is atomic: if it is interrupted, each file is in one of the two directories.
    target = _next_earlier(folder)
    with storing(target):
        target.mkdir()
        for path in paths:
            os.rename(path, target / path.name)
        sync_path(target)
        sync_path(folder)
    return target


def _next_earlier(folder: Path) -> Path:
    indices = [int(path.name.removeprefix("earlier_")) for path in folder.glob("earlier_[0-9]*")]
    return folder / f"earlier_{max(indices, default=0) + 1:03d}"


def log_dir(config: BaseRunConfig) -> Path:
    """Return the directory for the files of the run."""
    return Path(config.exp_manager.explicit_log_dir).expanduser()


def config_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return ``key: old -> new`` for each changed value, except added keys with empty lists."""
    old, new = flat(saved), flat(current)
    new = {key: value for key, value in new.items() if key in old or value != []}
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def sampler_and_steps(
    config: SamplingRunConfig | SupervisedRunConfig, train: Dataset[Any], batch_size: int
) -> tuple[PromptSampler, int]:
    """Return a sampler that draws ``batch_size`` items for each step, and the number of steps."""
    sampler = PromptSampler(
        len(train),
        batch_size,
        seed=config.seed,
        shuffle=config.data.shuffle,
        may_change=config.exp_manager.data_may_change,
        mixture=train.mixture,
    )
    return sampler, total_steps(config, sampler)


def total_steps(config: BaseRunConfig, sampler: PromptSampler) -> int:
    """Return the number of steps of the run: ``max_epochs`` epochs, but at most ``max_steps``."""
    loop, progress = config.loop, on_rank_zero(lambda: _saved_progress(config))
    steps = sampler.batches_left(loop.max_epochs)
    if progress is not None:
        # With unchanged limits, keep the number of steps. Else count from the saved data position.
        limits = [loop.max_epochs, loop.max_steps, sampler.batch_size, sampler.size]
        if progress["limits"] == limits:
            return int(progress["total_steps"])
        saved_sampler = copy.copy(sampler)
        saved_sampler.load_state_dict(progress["sampler"])
        steps = progress["steps"] + saved_sampler.batches_left(loop.max_epochs)
    return steps if loop.max_steps < 0 else min(loop.max_steps, steps)


def _saved_progress(config: BaseRunConfig) -> dict[str, Any] | None:
    """Return steps, limits and data position of the newest readable run state, or None."""
    for saved, state in _readable_states(RunStateStore(log_dir(config) / "run_state")):
        with suppress(KeyError):  # the restore reports the error
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
    return None


def _readable_states(store: RunStateStore) -> Iterator[tuple[SavedState, Mapping[str, Any]]]:
    """Yield the undamaged run states with their content, newest first."""
    for saved in reversed(store.states()):
        with suppress(DamagedStateError):
            yield saved, store.load(saved.path).state
