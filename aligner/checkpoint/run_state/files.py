"""The directories of a run state on the disk: reading their manifests, removing, recovering."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.checkpoint.durable import sync_path
from aligner.errors import CheckpointError, DamagedStateError

FORMAT = 3
_STEP_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class SavedState:
    """A complete state on the disk, by its manifest."""

    path: Path
    step: int
    monitor: str | None
    metric: float | None  # value of ``monitor`` at that step; None: not measured
    checksums: Mapping[str, str]  # of files by name; empty in states of earlier versions


def is_step(path: Path) -> bool:
    """Return whether this is a directory with the name of a finished state."""
    return _STEP_NAME.fullmatch(path.name) is not None and path.is_dir()


def read_manifest(path: Path) -> SavedState:
    """Contents of the manifest.

    Raises:
        DamagedStateError: the directory's files do not match it.
        CheckpointError: a complete state of another version of this format, which is refused, never
            passed over.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        if isinstance(manifest["format"], int) and manifest["format"] != FORMAT:
            raise CheckpointError(
                f"the run state {path} has format {manifest['format']} and this version reads "
                f"{FORMAT}; continue with the version that wrote it, or set "
                "exp_manager.explicit_log_dir to another directory"
            )
        for name, size in manifest["files"].items():
            if (path / name).stat().st_size != size:
                raise ValueError(f"{name} does not have {size} bytes")
        checksums = {str(n): str(c) for n, c in manifest.get("checksums", {}).items()}
        return SavedState(
            path, _step_of(path, manifest), manifest["monitor"], manifest["metric"], checksums
        )
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise DamagedStateError(
            f"the run state {path} is damaged or incomplete: {reason}"
        ) from error


def _step_of(path: Path, manifest: Mapping[str, Any]) -> int:
    step, metric = manifest["step"], manifest["metric"]
    named = _STEP_NAME.fullmatch(path.name)
    if type(step) is not int or (named is not None and step != int(named[1])):
        raise ValueError(f"manifest.json is of step {step!r}")
    if metric is not None and not isinstance(metric, (int, float)):
        raise ValueError(f"manifest.json has the metric {metric!r}")
    return step


def discard(path: Path) -> None:
    """Remove a directory so that no half of it can ever be taken for a state."""
    if not path.exists():
        return
    doomed = path.with_name(f".del-{path.name.lstrip('.')}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def recover(root: Path) -> None:
    """Undo an interrupted save, replacement or removal."""
    for old in root.glob(".old-step_*"):
        final = root / old.name.removeprefix(".old-")
        if final.exists():
            discard(old)
        else:  # died between the two renames
            os.rename(old, final)
    for pattern in (".tmp-step_*", ".del-*"):
        for leftover in root.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
    sync_path(root)
