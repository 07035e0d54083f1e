"""The directory of a run before the run: what is continued there, what is refused, what is kept.

A command continues the run that it began, and no other. ``run.json`` identifies a directory's run
(`RunIdentity`), and so does every run state. Nothing is deleted here: a run that begins anew in a
directory finds it emptied of the one before, whose files are in ``earlier_001/`` and so on.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from aligner.algorithms.run.identity import RunIdentity, flat
from aligner.checkpoint.durable import atomic_file, storage_error, sync_path
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import BaseRunConfig
from aligner.config.parse import defaults_of
from aligner.errors import CheckpointError, ConfigError, DamagedStateError
from aligner.observe.jsonl import read_lines

RUN_FILE = "run.json"
_HISTORY = ("metrics.jsonl", "samples.jsonl")
# Everything that a run leaves in its directory; a user's own files there stay where they are.
_LEFT_BY_A_RUN = (
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
    """A run's directory on the process that writes there."""

    folder: Path
    store: RunStateStore

    def prepare(self, identity: RunIdentity, config: BaseRunConfig) -> list[str]:
        """Make sure that what the run finds is its own, or nothing; what is to be said of it.

        Call it while holding the directory's `RunLock`, and hold that until the run has ended.

        Raises:
            ConfigError: another run is there, or any with ``exp_manager.resume_if_exists=false``.
            CheckpointError: the run there cannot be continued.
            StorageError: the directory cannot be written.
        """
        exp = config.exp_manager
        notes, began = [], None
        if exp.start_anew:
            notes += self._set_aside("exp_manager.start_anew=true")
        self.store.recover()
        states, damaged = self.store.survey()
        record = self._record()
        last = self._last_step()
        if not exp.resume_if_exists and (states or damaged or last is not None):
            held = states[-1].path.name if states else f"lines of up to step {last}"
            raise ConfigError(
                f"exp_manager.resume_if_exists=false, but {self.folder} holds a run (newest: "
                f"{held}); set it to true to continue, or {self._elsewhere()}"
            )
        if not states:
            self._check_not_lost(damaged, record, last)
            if last is not None and (last > 0 or record.get("identity") != identity.as_dict()):
                notes += self._set_aside("no run state had been saved")
        else:
            began = self._check_same(identity, config)
        began = began or self.began or datetime.now().isoformat()
        self._write({"identity": identity.as_dict(), "saved": bool(states), "began": began})
        return notes

    @property
    def began(self) -> str | None:
        """Local time at which the run began, in ISO format; None: nothing tells it."""
        return self._record().get("began")

    def mark_saved(self) -> None:
        """Note that a run state was saved: if none is there later, it was lost."""
        record = self._record()
        if not record.get("saved"):
            self._write({**record, "saved": True})

    def _check_same(self, identity: RunIdentity, config: BaseRunConfig) -> str | None:
        """Refuse another run's states; a damaged one is ignored (the loop skips it).

        The time at which the run began is returned, if its states tell it.
        """
        for saved in reversed(self.store.states()):
            try:
                state = self.store.load(saved.path).state
                before = RunIdentity.saved(state)
            except DamagedStateError:
                continue
            exp = config.exp_manager
            reasons = identity.refusals(
                before, exp.accept_changed, exp.resume_changed, defaults_of(config)
            )
            if reasons:
                raise ConfigError(
                    f"{self.folder} holds another run ({saved.path.name}): {'; '.join(reasons)}; "
                    f"{self._elsewhere()}"
                )
            return state.get("began")
        return None

    def _check_not_lost(
        self, damaged: Sequence[str], record: Mapping[str, Any], last: int | None
    ) -> None:
        if damaged:
            raise CheckpointError(
                f"no run state in {self.store.root} can be read: {'; '.join(damaged)}. Bring back "
                f"a copy of one, or {self._elsewhere()}"
            )
        # A run that was killed before its first save has lost nothing that it could go on from.
        if last is not None and last > 0 and record.get("saved", True):
            raise CheckpointError(
                f"{self.folder} holds the metrics of a run up to step {last} and no run state to "
                f"continue from; bring {self.store.root.name}/ back, or {self._elsewhere()}"
            )

    def _elsewhere(self) -> str:
        return (
            "set exp_manager.explicit_log_dir to another directory, or begin anew there with "
            f"exp_manager.start_anew=true (what is there moves into {_next_earlier(self.folder)})"
        )

    def _last_step(self) -> int | None:
        """Last step of the history; None: there is no history."""
        steps: list[int] = []
        for path in (self.folder / name for name in _HISTORY):
            try:
                steps += [line["step"] for line in read_lines(path)]
            except OSError as error:
                raise storage_error(path, error) from error
        return max(steps, default=None)

    def _set_aside(self, reason: str) -> list[str]:
        target = set_aside(self.folder)
        return [] if target is None else [f"{reason}: what an earlier run left is in {target}"]

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
    """Move what a run left in ``folder`` into a directory of its own there; None: there is nothing.

    What is not a run's stays. Killed in between, it goes on with the next start.
    """
    left = [folder / name for name in _LEFT_BY_A_RUN if (folder / name).exists()]
    left = [path for path in left if path.is_dir() or path.stat().st_size > 0]
    if not left:
        return None
    target = _next_earlier(folder)
    try:
        target.mkdir()
        for path in left:
            os.rename(path, target / path.name)
        sync_path(target)
        sync_path(folder)
    except OSError as error:
        raise storage_error(target, error) from error
    return target


def _next_earlier(folder: Path) -> Path:
    numbers = [int(path.name.removeprefix("earlier_")) for path in folder.glob("earlier_[0-9]*")]
    return folder / f"earlier_{max(numbers, default=0) + 1:03d}"


def log_dir(config: BaseRunConfig) -> Path:
    """Directory of the run."""
    return Path(config.exp_manager.explicit_log_dir).expanduser()


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``key: old -> new`` for every leaf that differs.

    A key that an earlier version did not have, and that is empty now, is no change.
    """
    old, new = flat(before), flat(now)
    new = {key: value for key, value in new.items() if key in old or value != []}
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
