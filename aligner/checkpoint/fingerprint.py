"""Fingerprints of model and data files, wherever they are, without reading all of them."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

_BLOCKS, _BLOCK = 64, 1 << 16  # a file of up to 4 MiB is read whole


def file_fingerprint(path: Path) -> str:
    """SHA-256 of a file's size and of blocks spread evenly over it, its first and last among them.

    Training changes every weight, so blocks are enough to distinguish models. Two large files that
    differ in a few bytes between the blocks have one fingerprint.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(f"{size} ".encode())
        if size <= _BLOCKS * _BLOCK:
            digest.update(file.read())
        else:
            for number in range(_BLOCKS):
                file.seek((size - _BLOCK) * number // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def model_fingerprint(source: str) -> str | None:
    """Fingerprint of a model, a file or an unpacked directory; None where none can be read."""
    path = Path(source).expanduser()
    if path.is_file():
        return fingerprint_of([path])
    if any((path / name).is_file() for name in ("config.json", "model_config.yaml")):
        return fingerprint_of(sorted(file for file in path.rglob("*") if file.is_file()))
    return None


def fingerprint_of(files: Sequence[Path]) -> str | None:
    """Fingerprint of files in their order, whatever their names; None where one cannot be read."""
    try:
        return hashlib.sha256(json.dumps([*map(file_fingerprint, files)]).encode()).hexdigest()[:32]
    except OSError:
        return None
