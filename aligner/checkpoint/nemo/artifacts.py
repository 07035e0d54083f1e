"""Tokenizer files and users' files (NeMo's ``register_artifact``) in a `.nemo` archive.

A file is the member ``<hex>_<name>``. A key of ``model_config.yaml`` refers to it with the value
``nemo:<hex>_<name>``.
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
    """Add the files of ``artifacts`` (dotted key of ``config`` → path). The keys refer to them."""
    for key, path in sorted(artifacts.items()):
        name = _PREFIX.sub("", path.name)  # files extracted from a `.nemo` already have a prefix
        *parents, leaf = key.split(".")
        level = config
        for parent in parents:
            level = level.setdefault(parent, {})
        level[leaf] = _add(archive, name, path.read_bytes())


def _add(archive: ArchiveWriter, name: str, content: bytes) -> str:
    member = f"{hashlib.sha256(content).hexdigest()[:32]}_{name}"  # NeMo's prefix is random
    archive.add(member, content)
    return f"{_REFERENCE}{member}"


def extract_artifacts(archive: ArchiveReader, config: Mapping[str, Any], folder: Path) -> None:
    """Copy the files that ``config`` refers to, except tokenizer files, into ``folder``."""
    outside = {key: value for key, value in config.items() if key != "tokenizer"}
    for member in archive.names & {*_references(outside)}:
        if Path(member).name != member:
            raise CheckpointError(
                f"model_config.yaml of {str(archive.path)!r} refers to 'nemo:{member}' in a "
                "folder. Move the file to the top level of the archive"
            )
        (folder / member).write_bytes(archive.read(member))


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, str) and value.startswith(_REFERENCE):
        yield value[len(_REFERENCE) :]


# Key of NeMo's section ``tokenizer`` → file name.
_ROLE_NAMES = {
    "model": "tokenizer.model",
    "tokenizer_model": "tokenizer.model",
    "vocab_file": "vocab.json",
    "merge_file": "merges.txt",
    "merges_file": "merges.txt",
}


def read_tokenizer_files(archive: ArchiveReader, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return name → content of the archive's tokenizer files, empty if it has none."""
    # Read the file names in the configuration.
    section, path = config.get("tokenizer") or {}, repr(str(archive.path))
    listed = section.get("files") or {} if isinstance(section, Mapping) else section
    if not isinstance(listed, Mapping):
        raise CheckpointError(
            f"tokenizer.files in model_config.yaml of {path} is a {type(listed).__name__}, but "
            "must be a mapping of file names to members of the archive"
        )
    # A conversion writes files with these names, so that a path could overwrite other files.
    for name in listed:
        if not is_tokenizer_file(name):
            raise CheckpointError(
                f"model_config.yaml of {path} lists {str(name)!r} as a tokenizer file, but no "
                "tokenizer has a file of this name: refused as malicious. Do not use the archive"
            )
    # Read the members that the configuration refers to. An absent member raises an error.
    roles = {_ROLE_NAMES[key]: section[key] for key in _ROLE_NAMES if section.get(key)}
    members = {
        name: value.removeprefix(_REFERENCE)
        for name, value in {**roles, **listed}.items()
        if isinstance(value, str) and value.startswith(_REFERENCE)
    }
    return {name: archive.read(member) for name, member in members.items()}


def write_tokenizer_files(archive: ArchiveWriter, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Add tokenizer files and return the section ``tokenizer`` that refers to them."""
    references = {name: _add(archive, name, content) for name, content in sorted(files.items())}
    section: dict[str, Any] = {"type": None, "model": None, "vocab_file": None, "merge_file": None}
    extra = {name: references.pop(name) for name in [GENERATION_CONFIG] if name in references}
    # NeMo has keys for two kinds of tokenizer. Files of other kinds are listed under ``files``.
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
        extra |= references
    return section | ({"files": extra} if extra else {})
