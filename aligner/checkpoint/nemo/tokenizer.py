"""Tokenizer files inside a `.nemo`: ``nemo:<hex>_<name>`` references in ``model_config.yaml``."""

import hashlib
from collections.abc import Mapping
from typing import Any

from aligner.checkpoint.nemo.archive import ArchiveReader, ArchiveWriter
from aligner.data.tokenizers.tokenizer import GENERATION_CONFIG, is_tokenizer_file
from aligner.errors import CheckpointError

_REFERENCE = "nemo:"
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

    The names are those that tokenizers have (`is_tokenizer_file`): an archive that asks for others,
    which would be written anywhere when the model is converted, is refused.
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
    return {
        name: archive.read(_member(archive, value[len(_REFERENCE) :]))
        for name, value in references.items()
        if isinstance(value, str) and value.startswith(_REFERENCE)
    }


def _member(archive: ArchiveReader, reference: str) -> str:
    if reference not in archive.names:
        raise CheckpointError(
            f"model_config.yaml names tokenizer file {reference!r}, which {str(archive.path)!r} "
            "does not hold"
        )
    return reference


def write_tokenizer_files(archive: ArchiveWriter, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Package tokenizer files; returns the ``tokenizer`` section that names them.

    The hexadecimal prefix, a random one in NeMo, is the content's digest here: equal models give
    equal bytes.
    """
    references: dict[str, str] = {}
    for name, content in sorted(files.items()):
        member = f"{hashlib.sha256(content).hexdigest()[:32]}_{name}"
        archive.add(member, content)
        references[name] = f"{_REFERENCE}{member}"
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
