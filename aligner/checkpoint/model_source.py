"""A model to start from, whichever way it is stored: a `.nemo`, or a Hugging Face directory."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import Weights
from aligner.checkpoint.hf.model_folder import read_hf
from aligner.checkpoint.nemo.config import Config
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import CheckpointError


class ModelSource(Protocol):
    """Valid while it is open; weights are read one by one when they are indexed."""

    @property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name; none where no tokenizer is packaged."""
        ...

    @property
    def config(self) -> Config:
        """The architecture, and what else is known of the model, under NeMo's keys."""
        ...

    @property
    def architecture(self) -> GPTArchitecture:
        """Shape of the model."""
        ...

    @property
    def weights(self) -> Weights:
        """Canonical weights (`aligner.checkpoint.canonical`)."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer packaged with it; `TokenizerError` where there is none."""
        ...


@contextlib.contextmanager
def open_model(path: str | os.PathLike[str]) -> Iterator[ModelSource]:
    """Open a `.nemo` (file or unpacked) or a Hugging Face directory or `.gguf` file.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path``.
        CheckpointError: it is neither, or damaged.
    """
    if Path(path).name == "config.json":
        raise CheckpointError(
            f"{str(path)!r} describes a Hugging Face model; give its directory, "
            f"{str(Path(path).parent)!r}"
        )
    if is_hugging_face(path):
        yield read_hf(path)
        return
    with open_nemo(path) as checkpoint:
        yield checkpoint


def is_hugging_face(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` looks like a Hugging Face model rather than a `.nemo`."""
    return Path(path).suffix == ".gguf" or (Path(path) / "config.json").is_file()
