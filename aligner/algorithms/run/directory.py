"""The directory of a run: a new command continues an earlier run, refuses it or moves it away.

``run.json`` and every run state identify the run of a directory (`RunIdentity`). Nothing is deleted
here: files of an earlier run move to ``earlier_001/``, ``earlier_002/`` and so on.
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
from aligner.observe.run_lock import LOCK_FILE
from aligner.parallel.collectives import on_rank_zero

RUN_FILE = "run.json"
_HISTORY = ("metrics.jsonl", "samples.jsonl")
# All files of a run in its directory. Other files there belong to the user and are not moved.
_RUN_FILES = (
    *(RUN_FILE, "run_state", *_HISTORY, "report.html", "tensorboard", "wandb", "wandb_id"),
    *("nonfinite", "workers", "reference_logprobs.pt"),
    *(
        f"{name}.{kind}"
        for name in ("policy", "reward_model")
        for kind in ("nemo", "lora.safetensors")
    ),
)


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a run, on the process that writes its files."""

    folder: Path
    store: RunStateStore

    def prepare(self, identity: RunIdentity, config: BaseRunConfig) -> list[str]:
        """Check that the locked directory is empty or contains this run. Return notes to print.

        Raises:
            ConfigError: another run is there, or any run with ``resume_if_exists=false``.
            CheckpointError: the directory contains this run, but no state to continue from.
            StorageError: the directory cannot be written.
        """
        exp, moved_to, start_time = config.exp_manager, None, None
        # Move an earlier run away if the user wants that.
        if exp.start_anew:
            moved_to, reason = set_aside(self.folder), "exp_manager.start_anew=true"
        self.store.recover()
        states, damaged = self.store.survey()
        record = self._record()
        steps: list[int] = []
        for path in (self.folder / name for name in _HISTORY):
            with storing(path):
                steps += [line["step"] for line in read_lines(path)]
        last = max(steps, default=None)
        if not exp.resume_if_exists and (states or damaged or last is not None):
            newest = damaged[-1] if last is None and damaged else f"metrics up to step {last}"
            newest = states[-1].path.name if states else newest
            raise ConfigError(
                f"exp_manager.resume_if_exists=false, but {self.folder} contains a run (newest: "
                f"{newest}). Set it to true to continue this run, or {self._remedy()}"
            )
        if states:
            start_time = self._check_same(identity, config)
        elif damaged:
            raise CheckpointError(
                f"no run state in {self.store.root} can be read: {', '.join(damaged)}. Copy one "
                f"back from a backup, or {self._remedy()}"
            )
        elif last is not None and last > 0 and record.get("saved", True):
            raise CheckpointError(
                f"{self.folder} contains metrics of a run up to step {last}, but no run state to "
                f"continue from. Copy {self.store.root.name}/ back, or {self._remedy()}"
            )
        elif last is not None and (last > 0 or record.get("identity") != identity.as_dict()):
            # An earlier run was killed before its first save.
            moved_to, reason = set_aside(self.folder), "no run state had been saved"
        start_time = start_time or self.start_time or datetime.now().isoformat()
        self._write({"identity": identity.as_dict(), "saved": bool(states), "began": start_time})
        return [f"{reason}: the files of an earlier run are in {moved_to}"] if moved_to else []

    @property
    def start_time(self) -> str | None:
        """Local time at which the run started, in ISO format, or None if unknown."""
        return self._record().get("began")

    def mark_saved(self) -> None:
        """Record in ``run.json`` that a run state was saved, so that missing states are noticed."""
        record = self._record()
        if not record.get("saved"):
            self._write({**record, "saved": True})

    def remove_if_unused(self) -> None:
        """Remove the directory if it contains no other files than ``run.json`` and the lock."""
        with suppress(OSError):  # such as a missing directory: the run's own error matters more
            files = {path.name for path in self.folder.iterdir()}
            if files <= {LOCK_FILE, RUN_FILE}:
                for name in files:
                    (self.folder / name).unlink()
                self.folder.rmdir()

    def _check_same(self, identity: RunIdentity, config: BaseRunConfig) -> str | None:
        """Raise if the newest readable state belongs to another run. Return its start time."""
        exp = config.exp_manager
        for saved, state in _readable_states(self.store):
            accepted, changed = exp.accept_changed, exp.resume_changed
            saved_identity, defaults = RunIdentity.saved(state), defaults_of(config)
            reasons = identity.refusals(saved_identity, accepted, changed, defaults)
            if reasons:
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
    """Move the files of a run into a new subdirectory. Return it, or None if there are no files."""
    paths = [folder / name for name in _RUN_FILES if (folder / name).exists()]
    paths = [path for path in paths if path.is_dir() or path.stat().st_size > 0]
    if not paths:
        return None
    # Rename, so that each file is either here or there.
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
    """Return ``key: old -> new`` for each key whose value differs, except new empty lists."""
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
    loop = config.loop
    steps, state = sampler.batches_left(loop.max_epochs), on_rank_zero(lambda: _newest(config))
    if state is not None:
        if state["limits"] == [loop.max_epochs, loop.max_steps, sampler.batch_size, sampler.size]:
            return int(state["total_steps"])
        saved_sampler = copy.copy(sampler)
        saved_sampler.load_state_dict(state["sampler"])
        steps = state["steps"] + saved_sampler.batches_left(loop.max_epochs)
    return steps if loop.max_steps < 0 else min(loop.max_steps, steps)


def _newest(config: BaseRunConfig) -> dict[str, Any] | None:
    """Return what `total_steps` reads from the newest readable run state, or None."""
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
