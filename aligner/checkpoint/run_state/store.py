"""Run states: one directory ``step_000012`` per step, complete or absent.

Rank 0 writes ``manifest.json`` (step, metric, sizes and checksums), ``state.json`` (entries without
tensors) and a file ``NAME.pt`` for each entry with tensors. Workers write the folders of the roles
(`worker_state`). Once all files are on the disk, the directory gets its final name. No code in the
files runs.

A state can be written in the background while training continues::

    in the step        all ranks: wait for the previous state, create the directory, copy tensors
    in the background  every worker: write its share, flush it, write its mark
                       rank 0: write its entries, wait for all marks, write manifest, rename
    every step         all ranks: if a write has failed on a rank, raise its error on all
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
_OTHERS_S = 30.0  # seconds to wait for other processes after an error


@dataclass(frozen=True)
class LoadedState(SavedState):
    """Run state with its entries. Their tensors are on the CPU and mapped from the files."""

    state: Mapping[str, Any]  # entry name → tree, as passed to ``save``


class SavedRole(Protocol):
    """Handle of a role's workers, each of which writes its share of the role's state."""

    @property
    def num_shares(self) -> int:
        """Number of shares, one per worker."""

    def begin_saving(self, folder: Path, in_background: bool) -> None:
        """Let each worker write its share, or copy it and write the copy in the background."""

    def check_saving(self, wait: bool) -> None:
        """Raise the error of a worker that could not write. ``wait``: wait for all first."""


@dataclass(frozen=True)
class _Pending:
    path: Path  # temporary directory
    size: int  # number of bytes that this rank writes
    roles: Mapping[str, SavedRole]
    task: BackgroundTask | None  # rank 0's writing of entries and manifest


class RunStateStore:
    """Directory ``root`` of run states, which writes, lists, reads and removes states.

    All ranks must call `save`, `check`, `finish`, `load` and `recover`. An error on one rank is
    raised on all ranks.

    Args:
        root: directory of the states, visible to all ranks.
        save_top_k: number of states to keep whose ``metric`` is best. If ``monitor`` is None,
            later states are better.
        monitor: name of the metric whose value is passed to `save`, or None.
        mode: whether a higher (``max``) or lower (``min``) metric is better.
        save_last_k: number of newest states to keep. Several help if the newest is damaged.
        rank: rank of this process.
        exchange: function that returns the list of all ranks' arguments on every rank.
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
        """Wait for the previous state, then write the state of ``step``. Return its directory.

        Args:
            step: number of the step.
            state: entry name → tree (`run_state.tree`), equal on every rank. Rank 0 writes it.
            metric: value of ``monitor`` at this step, or None if it was not measured.
            roles: folder name → workers of a model, which write into this folder.
            in_background: copy the data and return. Threads write the copies, and `check` raises
                their errors.
            on_saved: function that is called on rank 0 when the state is complete.
        """
        self.finish()
        roles = roles or {}
        # Copy the entries of rank 0, because training changes them.
        with self._raised_on_all():
            entries = _entries(state, in_background) if self.rank == 0 else {}
        size = sum(estimate_bytes(tree) for tree in entries.values())
        temporary = self.root / f".tmp-{self.path(step).name}"

        # Rank 0 writes its entries and completes the state, in the background or before the return.
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
            # Create the directory, let the workers write, then call `commit`.
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
        """Whether any rank is writing a state in the background."""
        return self._pending is not None

    def check(self, wait: bool = False) -> None:
        """Raise the error of background writing, if any. ``wait``: first wait for its end."""
        pending = self._pending
        if pending is None:
            return
        task, is_finished = pending.task, True
        try:
            # Raise errors of the workers, then of rank 0.
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
        """Wait until the last state is complete. Raises the error of background writing, if any."""
        self.check(wait=True)

    def drain(self) -> None:
        """Wait for the end of background writing. Does not raise, and needs no other rank."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        for role in pending.roles.values():
            with contextlib.suppress(Exception):
                role.check_saving(wait=True)
        if pending.task is not None and not pending.task.wait(_OTHERS_S):
            pending.task.stop()

    def _abandon(self, pending: _Pending) -> None:
        """Stop writing a state after an error, and remove it once all ranks have stopped."""
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
        """Return the directory of the state of ``step``, whether it exists or not."""
        return self.root / f"step_{step:06d}"

    def _commit(self, temporary: Path, step: int, metric: float | None) -> None:
        files = {
            str(path.relative_to(temporary)): path.stat().st_size
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        # The manifest has checksums of all files but those whose checksums are in their folder.
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
        """Return a number that is higher for better states, None without a value of ``monitor``."""
        if self.monitor is None:
            return state.step
        if state.metric is None or state.monitor != self.monitor:
            return None
        return state.metric if self.mode == "max" else -state.metric

    # Reading

    def survey(self) -> tuple[list[SavedState], list[str]]:
        """Return the complete states, oldest step first, and the error text of each damaged one."""
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
        """Remove the files of an interrupted save."""
        with self._raised_on_all():
            if self.rank == 0 and self.root.is_dir():
                recover(self.root)

    def load(self, path: Path) -> LoadedState:
        """Read the entries that rank 0 wrote, but not the workers' shares.

        Raises `DamagedStateError` if a file is damaged.
        """
        with self._raised_on_all():
            if not path.is_dir():
                raise CheckpointNotFoundError(
                    f"the run state {path} does not exist. Give the path of a directory step_NNNNNN"
                )
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
    for name in state:
        if not _ENTRY_NAME.fullmatch(name) or name in _RESERVED:
            raise CheckpointError(
                f"{name!r} cannot be the name of an entry in a run state. Use lower-case letters, "
                f"digits and underscores. The names {', '.join(_RESERVED)} are reserved"
            )
    trees = {name: normalise(tree, name) for name, tree in state.items()}
    return map_tensors(trees, Tensor.clone) if copies else trees


def _writing(path: Path, size: int) -> contextlib.AbstractContextManager[None]:
    note = f". The run state was not saved. Earlier states in {path.parent} are intact"
    return storing(path, size, note)
