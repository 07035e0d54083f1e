"""Opening of a model in any supported form: `.nemo`, Hugging Face directory or `.gguf`."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from aligner.checkpoint.hf.model_folder import HuggingFaceModel, read_hf
from aligner.checkpoint.nemo.model_file import NemoCheckpoint, open_nemo
from aligner.errors import CheckpointError

# Common attributes: ``architecture``, ``config`` (NeMo's keys), ``weights`` (canonical, read when
# indexed), ``tokenizer`` and ``tokenizer_files``. Valid while the model is open.
ModelSource = NemoCheckpoint | HuggingFaceModel


@contextlib.contextmanager
def open_model(path: str | os.PathLike[str]) -> Iterator[ModelSource]:
    """Open a `.nemo` (file or unpacked) or a Hugging Face directory or `.gguf` file.

    Raises:
        CheckpointNotFoundError: ``path`` does not exist.
        CheckpointError: ``path`` is none of these or damaged.
    """
    if Path(path).name == "config.json":
        raise CheckpointError(
            f"{str(path)!r} describes a Hugging Face model. Give its directory, "
            f"{str(Path(path).parent)!r}"
        )
    if Path(path).suffix == ".gguf" or (Path(path) / "config.json").is_file():
        yield read_hf(path)
        return
    with open_nemo(path) as checkpoint:
        yield checkpoint
