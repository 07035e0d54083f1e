"""Files inside a `.nemo`: those that users registered with a model, and the tokenizer's.

Each is a member ``<hex>_<name>`` of the archive, and the configuration key it was registered under
(NeMo's ``register_artifact``) holds ``nemo:<hex>_<name>``.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aligner.checkpoint.nemo.archive import ArchiveReader, ArchiveWriter
from aligner.data.tokenizers.tokenizer import GENERATION_CONFIG, is_tokenizer_file
from aligner.errors import CheckpointError

_REFERENCE = "nemo:"
_PREFIX = re.compile(r"^[0-9a-f]{32}_")


def write_artifacts(
    archive: ArchiveWriter, config: dict[str, Any], artifacts: Mapping[str, Path]
) -> None:
    """Package the files and point ``config`` (changed in place) at them, by dotted key."""
    for key, path in sorted(artifacts.items()):
        name = _PREFIX.sub("", path.name)  # one that came out of a `.nemo` has a prefix already
        *parents, leaf = key.split(".")
        level = config
        for parent in parents:
            level = level.setdefault(parent, {})
        level[leaf] = _add(archive, name, path.read_bytes())


def _add(archive: ArchiveWriter, name: str, content: bytes) -> str:
    """Package a file and return the reference to it.

    The hexadecimal prefix, a random one in NeMo, is the content's digest: equal models give equal
    bytes.
    """
    member = f"{hashlib.sha256(content).hexdigest()[:32]}_{name}"
    archive.add(member, content)
    return f"{_REFERENCE}{member}"


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


# NeMo names files by their role, whatever they were called when they were packed.
_ROLE_NAMES = {
    "model": "tokenizer.model",
    "tokenizer_model": "tokenizer.model",
    "vocab_file": "vocab.json",
    "merge_file": "merges.txt",
    "merges_file": "merges.txt",
}


def read_tokenizer_files(archive: ArchiveReader, config: Mapping[str, Any]) -> dict[str, bytes]:
    """File name → content of the packaged tokenizer; empty where none is packaged.

    The names are those that tokenizers have (`is_tokenizer_file`): an archive with others, which
    would be written anywhere when the model is converted, is refused.
    """
    section = config.get("tokenizer") or {}
    if not isinstance(section, Mapping):
        raise CheckpointError("tokenizer in model_config.yaml is not a mapping")
    roles = {_ROLE_NAMES[key]: section.get(key) for key in _ROLE_NAMES if key in section}
    listed = section.get("files") or {}
    if not isinstance(listed, Mapping):
        raise CheckpointError(
            f"tokenizer.files of model_config.yaml in {str(archive.path)!r} is a "
            f"{type(listed).__name__}, not a mapping of names to files"
        )
    for name in listed:
        if not is_tokenizer_file(name):
            raise CheckpointError(
                f"model_config.yaml of {str(archive.path)!r} names the tokenizer file "
                f"{str(name)!r}, which no tokenizer has; refused as malicious"
            )
    references = {**{name: value for name, value in roles.items() if value}, **listed}
    members = {
        name: value.removeprefix(_REFERENCE)
        for name, value in references.items()
        if isinstance(value, str) and value.startswith(_REFERENCE)
    }
    for member in members.values():
        if member not in archive.names:
            raise CheckpointError(
                f"model_config.yaml names tokenizer file {member!r}, which {str(archive.path)!r} "
                "does not hold"
            )
    return {name: archive.read(member) for name, member in members.items()}


def write_tokenizer_files(archive: ArchiveWriter, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Package tokenizer files; returns the ``tokenizer`` section that names them."""
    references = {name: _add(archive, name, content) for name, content in sorted(files.items())}
    section: dict[str, Any] = {"type": None, "model": None, "vocab_file": None, "merge_file": None}
    beside = {name: references.pop(name) for name in [GENERATION_CONFIG] if name in references}
    if set(references) == {"tokenizer.model"}:
        section |= {"library": "sentencepiece", "model": references["tokenizer.model"]}
    elif set(references) == {"vocab.json", "merges.txt"}:
        section |= {
            "library": "megatron",
            "type": "GPT2BPETokenizer",
            "vocab_file": references["vocab.json"],
            "merge_file": references["merges.txt"],
        }
    else:
        section |= {"library": "huggingface"}
        beside |= references
    return section | ({"files": beside} if beside else {})
