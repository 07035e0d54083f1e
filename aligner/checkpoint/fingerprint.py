"""Fingerprints of model and data files from samples of their content, independent of the path."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

_BLOCKS, _BLOCK = 64, 1 << 16  # a file of up to 4 MiB is read completely


def file_fingerprint(path: Path) -> str:
    """Compute the SHA-256 of a file's size and of evenly spaced blocks, including both ends.

    Training changes every weight, so blocks are enough to distinguish models. Two large files that
    differ only between the blocks have the same fingerprint.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(f"{size} ".encode())
        if size <= _BLOCKS * _BLOCK:
            digest.update(file.read())
        else:
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def model_fingerprint(source: str) -> str | None:
    """Return the fingerprint of a model file or directory, or None if none can be read."""
    path = Path(source).expanduser()
    if path.is_file():
        return fingerprint_of([path])
    if any((path / name).is_file() for name in ("config.json", "model_config.yaml")):
        return fingerprint_of(sorted(file for file in path.rglob("*") if file.is_file()))
    return None


def fingerprint_of(files: Sequence[Path]) -> str | None:
    """Return the fingerprint of ordered files without their names, or None if one is unreadable."""
    try:
        return hashlib.sha256(json.dumps([*map(file_fingerprint, files)]).encode()).hexdigest()[:32]
    except OSError:
        return None
