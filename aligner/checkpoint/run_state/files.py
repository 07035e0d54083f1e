"""Directories of run states: manifest, CRC-32 checksums, replacement, removal, recovery.

The checksums of a role's files are in `CHECKSUMS` in the role's folder, all others in the manifest.
"""

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.checkpoint.durable import sync_path, sync_tree
from aligner.errors import CheckpointError, DamagedStateError, StorageError, raised_as

FORMAT = 3
CHECKSUMS = "checksums.json"  # file name → checksum, for the files of the same folder
_STEP_NAME = re.compile(r"step_(\d{6,})")
_BLOCK = 1 << 22

# Gathers one small object of every rank on all ranks: `exchange(value)[r]` is rank r's value.
Exchange = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class SavedState:
    """Contents of the manifest of a complete state on the disk."""

    path: Path
    step: int
    monitor: str | None
    metric: float | None  # value of ``monitor`` at this step, None if not measured
    checksums: Mapping[str, str]  # file name → CRC-32, empty in states of earlier versions


@contextlib.contextmanager
def raised_on_all(exchange: Exchange, prefix: str = "") -> Iterator[None]:
    """Raise an error on all ranks if the ``with`` block fails on any rank.

    All ranks must run the block. A rank on which it fails raises its own error. The other ranks
    raise a `DamagedStateError` if all errors have this class, else a `StorageError`, with a message
    that begins with ``prefix``.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    is_damage = isinstance(error, DamagedStateError)
    reports = exchange(None if error is None else (str(error), is_damage))
    if error is not None:
        raise error
    failed = [f"rank {rank}: {report[0]}" for rank, report in enumerate(reports) if report]
    if failed:
        kind = DamagedStateError if all(r[1] for r in reports if r) else StorageError
        raise kind(prefix + "; ".join(failed))


def file_checksum(path: Path) -> str:
    """Compute the CRC-32 of a file's bytes, as eight hexadecimal digits."""
    checksum = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"


def read_checksums(folder: Path) -> dict[str, str]:
    """Return file name → checksum from `CHECKSUMS` in ``folder``, or {} without this file."""
    path = folder / CHECKSUMS
    if not path.exists():
        return {}
    damage = (OSError, ValueError, AttributeError, RecursionError)
    with raised_as(DamagedStateError, f"{path} cannot be read", *damage):
        return {str(name): str(value) for name, value in json.loads(path.read_bytes()).items()}


def check_files(folder: Path, checksums: Mapping[str, str]) -> None:
    """Raise `DamagedStateError` if a file is missing or its checksum differs from ``checksums``."""
    for name, expected in checksums.items():
        path = folder / name
        with raised_as(DamagedStateError, f"{path} cannot be read", OSError):
            actual = file_checksum(path)
        if actual != expected:
            raise DamagedStateError(
                f"{path} is damaged: its checksum was {expected} when it was saved, and is "
                f"{actual}. Copy it back from a backup, or continue from an earlier run state"
            )


def is_step(path: Path) -> bool:
    """Return whether ``path`` is a directory with the name of a finished state."""
    return _STEP_NAME.fullmatch(path.name) is not None and path.is_dir()


def read_manifest(path: Path) -> SavedState:
    """Read the manifest of a state.

    Raises `DamagedStateError` if the directory's files do not match the manifest, and
    `CheckpointError` if the state has another version of the format.
    """
    text = f"the run state {path} is damaged or incomplete"
    damage = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
    with raised_as(DamagedStateError, text, *damage):
        manifest = json.loads((path / "manifest.json").read_bytes())
        if isinstance(manifest["format"], int) and manifest["format"] != FORMAT:
            raise CheckpointError(
                f"the run state {path} has format {manifest['format']}, but this version reads "
                f"{FORMAT}. Continue with the version that wrote it, or set "
                "exp_manager.explicit_log_dir to another directory"
            )
        # Compare sizes. Checksums are compared when a state is loaded.
        for name, size in manifest["files"].items():
            if (path / name).stat().st_size != size:
                raise ValueError(f"{name} does not have {size} bytes")
        checksums = {str(n): str(c) for n, c in manifest.get("checksums", {}).items()}
        # The step must agree with the name of the directory.
        step, metric = manifest["step"], manifest["metric"]
        match = _STEP_NAME.fullmatch(path.name)
        is_valid = type(step) is int and (match is None or step == int(match[1]))
        if not is_valid or not isinstance(metric, int | float | None):
            raise ValueError(f"manifest.json has the step {step!r} and the metric {metric!r}")
        return SavedState(path, step, manifest["monitor"], metric, checksums)


def replace_folder(partial: Path, final: Path) -> None:
    """Flush ``partial`` to the disk and rename it to ``final``. An old ``final`` is removed."""
    sync_tree(partial)
    old = final.with_name(f".old-{final.name}")
    if final.exists():
        discard(old)
        os.rename(final, old)
    os.rename(partial, final)
    sync_path(final.parent)
    discard(old)


def discard(path: Path) -> None:
    """Remove a directory. It is renamed first, so that a part of it is never read as a state."""
    if not path.exists():
        return
    renamed = path.with_name(f".del-{path.name.lstrip('.')}")
    shutil.rmtree(renamed, ignore_errors=True)
    os.rename(path, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def recover(root: Path) -> None:
    """Remove partial directories of interrupted saves, and restore a half-replaced state."""
    for old in root.glob(".old-step_*"):
        final = root / old.name.removeprefix(".old-")
        if final.exists():
            discard(old)
        else:  # the process died between the two renames
            os.rename(old, final)
    for pattern in (".tmp-step_*", ".del-*"):
        for leftover in root.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
    sync_path(root)
