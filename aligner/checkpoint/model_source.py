"""Open a model in any supported format: `.nemo`, Hugging Face directory or `.gguf`."""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from aligner.checkpoint.hf.any_model import TransformersSource, read_any
from aligner.checkpoint.hf.families import FAMILIES
from aligner.checkpoint.hf.model_folder import HuggingFaceModel, read_hf, read_json
from aligner.checkpoint.nemo.model_file import NemoCheckpoint, open_nemo
from aligner.errors import CheckpointError

# Common attributes, valid while the model is open: ``architecture``, ``config`` (NeMo's keys),
# ``weights`` (read when indexed), ``tokenizer`` and ``tokenizer_files``.
ModelSource = NemoCheckpoint | HuggingFaceModel | TransformersSource

# Families that the dtensor backend loads by canonical names. transformers builds all others.
_DTENSOR_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


@contextlib.contextmanager
def open_model(
    path: str | os.PathLike[str],
    backend: str | None = None,
    adapted: bool = False,
    *,
    trusted: bool = False,
) -> Iterator[ModelSource]:
    """Yield the model at ``path``: `.nemo` file or directory, Hugging Face directory, `.gguf` file.

    ``backend``: value of ``policy.backend`` for this model, or None. ``adapted``: whether the model
    gets LoRA adapters. ``trusted``: whether Python code in a directory may run
    (``trust_remote_code``).

    Raises `CheckpointError` if ``path`` does not exist, has another format, or is damaged.
    """
    if Path(path).name == "config.json":
        raise CheckpointError(
            f"{str(path)!r} is a file of a Hugging Face model. Give the model's directory, "
            f"{str(Path(path).parent)!r}"
        )
    if is_built_by_transformers(path, backend, adapted, trusted=trusted):
        yield read_any(Path(path), trusted=trusted)
        return
    if Path(path).suffix == ".gguf" or (Path(path) / "config.json").is_file():
        yield read_hf(path)
        return
    with open_nemo(path) as checkpoint:
        yield checkpoint


def is_built_by_transformers(
    path: str | os.PathLike[str],
    backend: str | None = None,
    adapted: bool = False,
    *,
    trusted: bool = False,
) -> bool:
    """Return whether transformers builds the model, not this library. Arguments: `open_model`'s."""
    file = Path(path) / "config.json"
    return file.is_file() and lacks_table(read_json(file), backend, adapted, trusted=trusted)


def lacks_table(
    settings: Mapping[str, Any], backend: str | None, adapted: bool, *, trusted: bool
) -> bool:
    """Return whether transformers must build the model whose ``config.json`` is ``settings``."""
    families: Collection[str] = FAMILIES
    if backend == "dtensor":
        families = () if adapted else _DTENSOR_FAMILIES
    return settings.get("model_type") not in families or (trusted and "auto_map" in settings)
