"""A model to start from, whichever way it is stored: a `.nemo`, or a Hugging Face directory."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from aligner.checkpoint.hf.model_folder import HuggingFaceModel, read_hf
from aligner.checkpoint.nemo.model_file import NemoCheckpoint, open_nemo
from aligner.errors import CheckpointError

# Both have ``architecture``, ``config`` (NeMo's keys), ``weights`` (canonical, each read when it is
# indexed), ``tokenizer`` and ``tokenizer_files``, and are valid while they are open.
ModelSource = NemoCheckpoint | HuggingFaceModel


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
    if Path(path).suffix == ".gguf" or (Path(path) / "config.json").is_file():
        yield read_hf(path)
        return
    with open_nemo(path) as checkpoint:
        yield checkpoint
