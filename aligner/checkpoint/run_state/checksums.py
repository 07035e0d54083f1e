"""Checksums of the files of a run state: damage on the disk is seen before anything is restored.

CRC-32, computed while the bytes are written. It is against accidents (a flipped bit, a block of
zeros after a power cut), not against people.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from aligner.checkpoint.durable import write_json
from aligner.errors import DamagedStateError

CHECKSUMS = "checksums.json"  # in a folder: the checksum of each of its files by name
_BLOCK = 1 << 22


def checksum_text(checksum: int) -> str:
    """The checksum as written in JSON: eight hexadecimal digits."""
    return f"{checksum:08x}"


def file_checksum(path: Path) -> str:
    """CRC-32 of a file's bytes."""
    checksum = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum_text(checksum)


def write_checksums(folder: Path, checksums: Mapping[str, int]) -> None:
    """Write the checksums of files of ``folder`` beside them."""
    write_json(folder / CHECKSUMS, {name: checksum_text(c) for name, c in checksums.items()})


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the checksums that `write_checksums` wrote; empty where the folder has none."""
    path = folder / CHECKSUMS
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
        return {str(name): str(checksum) for name, checksum in found.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedStateError(f"{path} cannot be read: {error}") from error


def damage(folder: Path, checksums: Mapping[str, str]) -> str | None:
    """Describe the first damaged file of ``folder``; None where all are whole.

    ``checksums``: of the files to look at, by name.
    """
    for name, written in checksums.items():
        path = folder / name
        try:
            found = file_checksum(path)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
        if found != written:
            return f"{path} is damaged: its checksum is {found} and was {written} when it was saved"
    return None
