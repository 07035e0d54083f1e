"""Run state: one directory per step, complete or not there at all.

::

    <root>/step_000012/manifest.json   step, metric, size and checksum of every file
                       state.json      entries without tensors: counters, scheduler, config, …
                       rng.pt          one file per entry with tensors, written by rank 0
                       policy/         what the workers of a role write (`worker_state`), whose
                                       checksums stand in a file there

A state is written into ``.tmp-step_000012``, every file and directory is flushed to the disk, and
only then it gets its name. A process that dies at any moment leaves the earlier states as they
were; `RunStateStore.latest` removes what it left behind. A state with damaged files is not used.
Nothing is read from a file name but the step, and nothing is unpickled.

While training goes on, a state is written by threads::

    in the step    every rank: wait for the state before, agree on the directory, copy
    beside it      every worker: its share, flushed, then its mark
                   rank 0: its entries; once all marks are there, manifest and name
    every step     all ranks: agree on whether anything has failed, and raise that
"""

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from threading import Event
from typing import Any, Literal, Protocol

from torch import Tensor

from aligner.checkpoint.background import BackgroundTask
from aligner.checkpoint.durable import (
    require_free_space,
    storage_error,
    write_json,
)
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
from aligner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DamagedStateError,
    StorageError,
    raised_as,
)

logger = logging.getLogger(__name__)

_ENTRY_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = ("state", "manifest")
_OTHERS_S = 30.0  # after an error, for shares of other processes that may not come any more


@dataclass(frozen=True)
class LoadedState(SavedState):
    """A state in memory. Tensors are on the CPU, backed by the file and copied when changed."""

    state: Mapping[str, Any]  # every entry given to ``save`` under its name


class SavedRole(Protocol):
    """Workers that write the shares of a role, as its handle has them."""

    @property
    def num_shares(self) -> int:
        """Number of shares."""
        ...

    def prepare_saving(self) -> None:
        """Let each worker allocate the memory of a copy of its share beforehand."""
        ...

    def begin_saving(self, folder: Path, in_background: bool) -> None:
        """Let each worker write its share as it is now, or take a copy and write that."""
        ...

    def check_saving(self, wait: bool) -> None:
        """Raise the error of writing; ``wait``: until it is over."""
        ...


@dataclass(frozen=True)
class _Pending:
    """A state that is being written while training goes on."""

    path: Path  # of its directory until it gets its name
    needed: int  # bytes, of this rank
    roles: Mapping[str, SavedRole]
    task: BackgroundTask | None  # rank 0's, which ends with the state's name


class RunStateStore:
    """Saves, finds, loads and thins out the run states below ``root``.

    Args:
        root: directory of the states; with several ranks, one that all of them see.
        save_top_k: number of the best kept by ``metric`` besides the newest (0: newest only).
            Without ``monitor`` the newest are the best.
        monitor: name of the metric given to `save`; None: none is given.
        mode: whether more (``max``) or less of the metric is better.
        save_last_k: number of the newest kept: where the newest turns out to be damaged, a run goes
            on from the one before.
        rank: this process's; rank 0 writes what the ranks share.
        exchange: gathers one object of every rank; the default is that of one process.

    `save`, `check`, `finish`, `load` and `latest` are collective: every rank calls them, and an
    error on one rank is raised on all.
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
        self.root = Path(root)
        self.save_top_k, self.monitor, self.mode = save_top_k, monitor, mode
        self.save_last_k = save_last_k
        self.rank, self._exchange = rank, exchange
        self._pending: _Pending | None = None

    # Writing

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metric: float | None = None,
        *,
        roles: Mapping[str, SavedRole] | None = None,
        write: Callable[[Path], None] = lambda folder: None,
        in_background: bool = False,
        on_saved: Callable[[], None] = lambda: None,
    ) -> Path:
        """Write the state of ``step`` and return its directory.

        The state before it is waited for. With ``in_background`` this returns once everything that
        may change is copied, and the directory is complete later; see `check` and `finish`.

        ``state``: named trees (`run_state.tree`) that are the same on every rank; rank 0 writes
        them. ``roles``: by the name of their folders, the workers of which write the rest.
        ``write``: called on every rank with the directory, to write whatever else belongs to the
        state into folders of it. ``metric``: value of ``monitor`` at this step, None where it was
        not measured. ``on_saved``: called on rank 0 when the state is complete.
        """
        if metric is not None and self.monitor is None:
            raise ConfigError(f"metric {metric} was given to a store without a monitor")
        self.finish()
        roles = roles or {}
        with self._together():
            entries = _entries(state, in_background) if self.rank == 0 else {}
        needed = sum(estimate_bytes(tree) for tree in entries.values())
        temporary = self.root / f".tmp-{self.path(step).name}"

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
            with self._together(), _as_storage_error(temporary, needed):
                if self.rank == 0:
                    self.root.mkdir(parents=True, exist_ok=True)
                    shutil.rmtree(temporary, ignore_errors=True)
                    require_free_space(self.root, needed)
                    temporary.mkdir()
            with self._together(), _as_storage_error(temporary, needed):
                write(temporary)
                for name, role in roles.items():
                    role.begin_saving(temporary / name, in_background)
            if in_background:
                task = BackgroundTask(commit, "run state") if self.rank == 0 else None
                self._pending = _Pending(temporary, needed, roles, task)
            else:
                with self._together(), _as_storage_error(temporary, needed):
                    if self.rank == 0:
                        commit()
        except Exception:
            self._give_up(_Pending(temporary, needed, roles, None))
            raise
        return self.path(step)

    @property
    def is_saving(self) -> bool:
        """True if a state is being written in the background, as far as all ranks know."""
        return self._pending is not None

    def check(self, wait: bool = False) -> None:
        """Raise the error of writing in the background, and remove the incomplete state.

        ``wait``: until the state is complete.
        """
        pending = self._pending
        if pending is None:
            return
        task, is_over = pending.task, True
        try:
            with self._together(), _as_storage_error(pending.path, pending.needed):
                for role in pending.roles.values():
                    role.check_saving(wait)
            with self._together(), _as_storage_error(pending.path, pending.needed):
                if task is not None:
                    is_over = task.wait() if wait else task.done
                    if task.error is not None:
                        raise task.error
        except Exception:
            self._give_up(pending)
            raise
        if all(self._exchange(is_over)):
            self._pending = None

    def finish(self) -> None:
        """Wait until the last state is complete; raises as `check` does."""
        self.check(wait=True)

    def drain(self) -> None:
        """After an error on only this rank: have the last state written, if all others do so."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        for role in pending.roles.values():
            with contextlib.suppress(Exception):
                role.check_saving(wait=True)
        if pending.task is not None and not pending.task.wait(_OTHERS_S):
            pending.task.stop()

    def _give_up(self, pending: _Pending) -> None:
        """Remove a state that cannot become complete, once no rank writes it any more."""
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
        """Path of the state of ``step``, present or not."""
        return self.root / f"step_{step:06d}"

    def _commit(self, temporary: Path, step: int, metric: float | None) -> None:
        files = {
            str(path.relative_to(temporary)): path.stat().st_size
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        # Those of a role's files are beside them.
        roles = {Path(name).parent for name in files if name.endswith(f"/{CHECKSUMS}")}
        known = {str(role / name) for role in roles for name in read_checksums(temporary / role)}
        manifest = {
            "format": FORMAT,
            "step": step,
            "monitor": self.monitor,
            "metric": metric if metric is not None and isfinite(metric) else None,
            "files": files,
            "checksums": {
                name: file_checksum(temporary / name) for name in files if name not in known
            },
        }
        write_json(temporary / "manifest.json", manifest)
        replace_folder(temporary, self.path(step))
        self._thin_out()

    def _thin_out(self) -> None:
        """Remove all states but the newest ``save_last_k`` and the best ``save_top_k``."""
        states = self.states()
        ranked = sorted(
            (state for state in states if self._score(state) is not None),
            key=lambda state: (self._score(state), state.step),
            reverse=True,
        )
        kept = {state.path for state in [*ranked[: self.save_top_k], *states[-self.save_last_k :]]}
        for state in states:
            if state.path not in kept:
                discard(state.path)

    def _score(self, state: SavedState) -> float | None:
        """More is better; None: cannot be ranked (not measured, or measured something else)."""
        if self.monitor is None:
            return state.step
        if state.metric is None or state.monitor != self.monitor:
            return None
        return state.metric if self.mode == "max" else -state.metric

    # Reading

    def survey(self) -> tuple[list[SavedState], list[str]]:
        """The complete states, oldest step first, and what is wrong with each of the others.

        Sizes of files are looked at, their checksums where they are loaded. Changes nothing.
        """
        states, damaged = [], []
        folders = sorted(filter(is_step, self.root.iterdir())) if self.root.is_dir() else []
        for folder in folders:
            try:
                states.append(read_manifest(folder))
            except DamagedStateError as error:
                damaged.append(str(error))
        return sorted(states, key=lambda state: state.step), damaged

    def states(self) -> list[SavedState]:
        """The complete states, oldest step first. Changes nothing."""
        return self.survey()[0]

    def recover(self) -> None:
        """Remove what an interrupted save left behind."""
        with self._together():
            if self.rank == 0 and self.root.is_dir():
                recover(self.root)

    def latest(self) -> Path | None:
        """The newest complete state, after removing what an interrupted save left behind."""
        self.recover()
        states, damaged = self.survey()
        for reason in damaged:
            logger.warning("passed over: %s", reason)
        return states[-1].path if states else None

    def load(self, path: Path) -> LoadedState:
        """Read what rank 0 wrote; equal on every rank.

        Raises:
            DamagedStateError: a file is not what was written; on every rank where it is on one.
        """
        with self._together():
            if not path.is_dir():
                raise CheckpointNotFoundError(f"there is no run state at {path}")
            saved = read_manifest(path)
            check_files(path, saved.checksums)
            plain = path / "state.json"
            damage = (OSError, ValueError, RecursionError)
            with raised_as(DamagedStateError, f"{plain} cannot be read", *damage):
                state = json.loads(plain.read_bytes()) if plain.exists() else {}
            trees = {file.stem: read_tree(file) for file in path.glob("*.pt")}
        return LoadedState(**vars(saved), state={**state, **trees})

    def _together(self) -> contextlib.AbstractContextManager[None]:
        return raised_on_all(self._exchange)


def _entries(state: Mapping[str, Any], is_to_change: bool) -> dict[str, Any]:
    """Trees to write; copies if what they are made of changes meanwhile."""
    for name in state:
        if not _ENTRY_NAME.fullmatch(name) or name in _RESERVED:
            raise CheckpointError(
                f"{name!r} cannot name an entry of a run state; use lower-case letters, digits "
                f"and underscores, and none of {', '.join(_RESERVED)}"
            )
    trees = {name: normalise(tree, name) for name, tree in state.items()}
    return map_tensors(trees, Tensor.clone) if is_to_change else trees


@contextlib.contextmanager
def _as_storage_error(path: Path, needed: int) -> Iterator[None]:
    """Turn a failed write below ``path`` into a `StorageError` that also names what is left."""
    try:
        yield
    except OSError as error:
        refined = error if isinstance(error, StorageError) else storage_error(path, error, needed)
        explained = StorageError(
            f"{refined}. The run state was not saved; earlier ones in {path.parent} are intact"
        )
        explained.errno = refined.errno
        raise explained from error
