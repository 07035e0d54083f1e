"""Files that users registered with a model (NeMo's ``register_artifact``), inside a `.nemo`.

Each is a member ``<hex>_<name>`` of the archive, and the configuration key it was registered under
holds ``nemo:<hex>_<name>``.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aligner.checkpoint.nemo.archive import ArchiveReader, ArchiveWriter
from aligner.errors import CheckpointError

_REFERENCE = "nemo:"
_PREFIX = re.compile(r"^[0-9a-f]{32}_")


def write_artifacts(
    archive: ArchiveWriter, config: dict[str, Any], artifacts: Mapping[str, Path]
) -> None:
    """Package the files and point ``config`` (changed in place) at them, by dotted key."""
    for key, path in sorted(artifacts.items()):
        content = path.read_bytes()
        name = _PREFIX.sub("", path.name)  # one that came out of a `.nemo` has a prefix already
        member = f"{hashlib.sha256(content).hexdigest()[:32]}_{name}"
        archive.add(member, content)
        *parents, leaf = key.split(".")
        level = config
        for name in parents:
            level = level.setdefault(name, {})
        level[leaf] = f"{_REFERENCE}{member}"


def extract_artifacts(archive: ArchiveReader, config: Mapping[str, Any], folder: Path) -> bool:
    """Copy the members that ``config`` refers to, the tokenizer's aside; whether there were any.

    Their names are plain: `CheckpointError` for a member in a folder of the archive.
    """
    outside = {key: value for key, value in config.items() if key != "tokenizer"}
    members = [member for member in _references(outside) if member in archive.names]
    for member in members:
        if Path(member).name != member:
            raise CheckpointError(
                f"model_config.yaml of {str(archive.path)!r} refers to 'nemo:{member}'; the files "
                "of users lie at the top of an archive, so it is refused"
            )
        (folder / member).write_bytes(archive.read(member))
    return bool(members)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, str) and value.startswith(_REFERENCE):
        yield value[len(_REFERENCE) :]
