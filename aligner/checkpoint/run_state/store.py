"""Run states: one directory ``step_000012`` per step, complete or absent.

Rank 0 writes ``manifest.json`` (step, metric, sizes and checksums), ``state.json`` (entries without
tensors) and ``NAME.pt`` (an entry with tensors), workers the folders of the roles (`worker_state`).
The directory is renamed after every file is flushed to the disk. Nothing is unpickled.

Threads write a state while training continues::

    in the step        every rank: wait for the previous state, agree on the directory, copy
    in the background  every worker: its share, flushed, then its mark
                       rank 0: its entries, and after all marks the manifest and the rename
    every step         all ranks: agree on whether a write has failed, and raise its error
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from threading import Event
from typing import Any, Literal, Protocol

from torch import Tensor

from aligner.checkpoint.background import BackgroundTask
from aligner.checkpoint.durable import require_free_space, storing, write_json
from aligner.checkpoint.run_state.files import (
    CHECKSUMS,
    FORMAT,
    Exchange,
    SavedState,
    check_files,
    discard,
    file_checksum,
    is_step,
    raised_on_all,
    read_checksums,
    read_manifest,
    recover,
    replace_folder,
)
from aligner.checkpoint.run_state.tree import (
    estimate_bytes,
    is_json,
    map_tensors,
    normalise,
    read_tree,
    write_tree,
)
from aligner.checkpoint.run_state.worker_state import seal
from aligner.errors import CheckpointError, CheckpointNotFoundError, DamagedStateError, raised_as

_ENTRY_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = ("state", "manifest")
_OTHERS_S = 30.0  # after an error, time limit for the shares of other processes


@dataclass(frozen=True)
class LoadedState(SavedState):
    """A state in memory. Tensors are on the CPU, backed by the file and copied on write."""

    state: Mapping[str, Any]  # every entry passed to ``save``, by name


class SavedRole(Protocol):
    """Handle of the workers that write the shares of a role."""

    @property
    def num_shares(self) -> int:
        """Number of shares."""

    def begin_saving(self, folder: Path, in_background: bool) -> None:
        """Let each worker write its current share, or a copy of it in the background."""

    def check_saving(self, wait: bool) -> None:
        """Raise the error of writing. ``wait``: first wait for the end of writing."""


@dataclass(frozen=True)
class _Pending:
    """A state that is being written while training continues."""

    path: Path  # of its directory before the rename
    size: int  # bytes of this rank
    roles: Mapping[str, SavedRole]
    task: BackgroundTask | None  # on rank 0, ends with the rename


class RunStateStore:
    """Storage of the run states below ``root``.

    All ranks must call `save`, `check`, `finish`, `load` and `recover`. An error on one rank is
    raised on all ranks.

    Args:
        root: directory of the states, visible to all ranks.
        save_top_k: number of best states to keep, by ``metric``, or by step without ``monitor``.
        monitor: name of the metric passed to `save`, or None without a metric.
        mode: whether a higher (``max``) or lower (``min``) metric is better.
        save_last_k: number of newest states to keep. If the newest is damaged, a run continues
            from the previous one.
        rank: rank of this process.
        exchange: function that gathers one object of every rank. The default is for one process.
    """

    def __init__(
        self,
        root: Path | str,
        save_top_k: int = 1,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        *,
        save_last_k: int = 1,
        rank: int = 0,
        exchange: Exchange = lambda mine: [mine],
    ) -> None:
        self.root, self.rank, self._exchange = Path(root), rank, exchange
        self.save_top_k, self.save_last_k = save_top_k, save_last_k
        self.monitor, self.mode = monitor, mode
        self._pending: _Pending | None = None

    # Writing

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metric: float | None = None,
        *,
        roles: Mapping[str, SavedRole] | None = None,
        in_background: bool = False,
        on_saved: Callable[[], None] = lambda: None,
    ) -> Path:
        """Write the state of ``step`` and return its directory, after the previous state.

        Args:
            step: step of the state.
            state: named trees (`run_state.tree`), equal on every rank. Rank 0 writes them.
            metric: value of ``monitor`` at this step, or None if it was not measured.
            roles: folder name → role whose workers write into this folder.
            in_background: whether threads write copies of the data after the call (see `check`).
            on_saved: function that is called on rank 0 when the state is complete.
        """
        self.finish()
        roles = roles or {}
        # Copy the entries of rank 0, because training changes them.
        with self._raised_on_all():
            entries = _entries(state, in_background) if self.rank == 0 else {}
        size = sum(estimate_bytes(tree) for tree in entries.values())
        temporary = self.root / f".tmp-{self.path(step).name}"

        # Rank 0 commits, in the background or before the call returns.
        def commit(stop: Event | None = None) -> None:
            plain = {name: tree for name, tree in entries.items() if is_json(tree)}
            write_json(temporary / "state.json", plain)
            for name in entries.keys() - plain.keys():
                write_tree(temporary / f"{name}.pt", entries[name], stop)
            for name, role in roles.items():
                seal(temporary / name, role.num_shares, stop)
            self._commit(temporary, step, metric)
            on_saved()

        try:
            # Create the directory, start the workers, then write the entries and rename.
            with self._raised_on_all(), _writing(temporary, size):
                if self.rank == 0:
                    self.root.mkdir(parents=True, exist_ok=True)
                    shutil.rmtree(temporary, ignore_errors=True)
                    require_free_space(self.root, size)
                    temporary.mkdir()
            with self._raised_on_all(), _writing(temporary, size):
                for name, role in roles.items():
                    role.begin_saving(temporary / name, in_background)
            if in_background:
                task = BackgroundTask(commit, "run state") if self.rank == 0 else None
                self._pending = _Pending(temporary, size, roles, task)
            else:
                with self._raised_on_all(), _writing(temporary, size):
                    if self.rank == 0:
                        commit()
        except Exception:
            self._abandon(_Pending(temporary, size, roles, None))
            raise
        return self.path(step)

    @property
    def is_saving(self) -> bool:
        """True if a state is being written in the background on any rank."""
        return self._pending is not None

    def check(self, wait: bool = False) -> None:
        """Raise the error of writing in the background. ``wait``: wait for the complete state."""
        pending = self._pending
        if pending is None:
            return
        task, is_finished = pending.task, True
        try:
            # Errors of the workers, then of rank 0.
            with self._raised_on_all(), _writing(pending.path, pending.size):
                for role in pending.roles.values():
                    role.check_saving(wait)
            with self._raised_on_all(), _writing(pending.path, pending.size):
                if task is not None:
                    is_finished = task.wait() if wait else task.is_finished
                    if task.error is not None:
                        raise task.error
        except Exception:
            self._abandon(pending)
            raise
        if all(self._exchange(is_finished)):
            self._pending = None

    def finish(self) -> None:
        """Wait until the last state is complete, and raise its error like `check`."""
        self.check(wait=True)

    def drain(self) -> None:
        """Wait for the last state after an error on this rank only, if all other ranks write."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        for role in pending.roles.values():
            with contextlib.suppress(Exception):
                role.check_saving(wait=True)
        if pending.task is not None and not pending.task.wait(_OTHERS_S):
            pending.task.stop()

    def _abandon(self, pending: _Pending) -> None:
        """Remove a state that cannot become complete, after all ranks stopped writing it."""
        self._pending = None
        if pending.task is not None:
            pending.task.stop()
        for role in pending.roles.values():
            with contextlib.suppress(Exception):
                role.check_saving(wait=True)
        self._exchange(None)
        if self.rank == 0:
            shutil.rmtree(pending.path, ignore_errors=True)

    def path(self, step: int) -> Path:
        """Return the path of the state of ``step``, which may not exist."""
        return self.root / f"step_{step:06d}"

    def _commit(self, temporary: Path, step: int, metric: float | None) -> None:
        files = {
            str(path.relative_to(temporary)): path.stat().st_size
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        # The checksums of a role's files are in the role's folder.
        roles = {Path(name).parent for name in files if name.endswith(f"/{CHECKSUMS}")}
        of_roles = {str(role / name) for role in roles for name in read_checksums(temporary / role)}
        manifest = {
            "format": FORMAT,
            "step": step,
            "monitor": self.monitor,
            "metric": metric if metric is not None and isfinite(metric) else None,
            "files": files,
            "checksums": {
                name: file_checksum(temporary / name) for name in files if name not in of_roles
            },
        }
        write_json(temporary / "manifest.json", manifest)
        replace_folder(temporary, self.path(step))
        self._thin_out()

    def _thin_out(self) -> None:
        """Remove all states except the newest ``save_last_k`` and the best ``save_top_k``."""
        states = self.states()
        ranked = sorted(
            (state for state in states if self._score(state) is not None),
            key=lambda state: (self._score(state), state.step),
            reverse=True,
        )
        retained = [*ranked[: self.save_top_k], *states[-self.save_last_k :]]
        for path in {state.path for state in states} - {state.path for state in retained}:
            discard(path)

    def _score(self, state: SavedState) -> float | None:
        """Return a number that is higher for better states. None without a ``monitor`` value."""
        if self.monitor is None:
            return state.step
        if state.metric is None or state.monitor != self.monitor:
            return None
        return state.metric if self.mode == "max" else -state.metric

    # Reading

    def survey(self) -> tuple[list[SavedState], list[str]]:
        """Return the states with complete files, oldest first, and the errors of the others."""
        states, damaged = [], []
        folders = sorted(filter(is_step, self.root.iterdir())) if self.root.is_dir() else []
        for folder in folders:
            try:
                states.append(read_manifest(folder))
            except DamagedStateError as error:
                damaged.append(str(error))
        return sorted(states, key=lambda state: state.step), damaged

    def states(self) -> list[SavedState]:
        """Return the complete states, oldest step first."""
        return self.survey()[0]

    def recover(self) -> None:
        """Remove the remains of an interrupted save."""
        with self._raised_on_all():
            if self.rank == 0 and self.root.is_dir():
                recover(self.root)

    def load(self, path: Path) -> LoadedState:
        """Read the entries that rank 0 wrote. Raise `DamagedStateError` if a file is damaged."""
        with self._raised_on_all():
            if not path.is_dir():
                raise CheckpointNotFoundError(f"run state {path} does not exist")
            saved = read_manifest(path)
            check_files(path, saved.checksums)
            plain = path / "state.json"
            damage = (OSError, ValueError, RecursionError)
            with raised_as(DamagedStateError, f"{plain} cannot be read", *damage):
                state = json.loads(plain.read_bytes()) if plain.exists() else {}
            trees = {file.stem: read_tree(file) for file in path.glob("*.pt")}
        return LoadedState(**vars(saved), state={**state, **trees})

    def _raised_on_all(self) -> contextlib.AbstractContextManager[None]:
        return raised_on_all(self._exchange)


def _entries(state: Mapping[str, Any], copies: bool) -> dict[str, Any]:
    """Return the trees to write. ``copies``: with copies of their tensors."""
    for name in state:
        if not _ENTRY_NAME.fullmatch(name) or name in _RESERVED:
            raise CheckpointError(
                f"{name!r} cannot be the name of a run state's entry. Use lower-case letters, "
                f"digits and underscores, and none of {', '.join(_RESERVED)}"
            )
    trees = {name: normalise(tree, name) for name, tree in state.items()}
    return map_tensors(trees, Tensor.clone) if copies else trees


def _writing(path: Path, size: int) -> contextlib.AbstractContextManager[None]:
    """Turn a failed write below ``path`` into a `StorageError` that mentions earlier states."""
    note = f". The run state was not saved. Earlier states in {path.parent} are intact"
    return storing(path, size, note)
