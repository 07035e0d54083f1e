"""GGUF files, dequantised by transformers."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import pre_tokenizers
from torch import Tensor

from aligner.data.tokenizers.tokenizer import is_tokenizer_file
from aligner.errors import CheckpointError


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, bytes]]:
    """``config.json``, float32 state dict and tokenizer files of a GGUF model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": path.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), **where)
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **where)
    except Exception as error:  # transformers, gguf and numpy raise many kinds on a bad file
        raise CheckpointError(f"{str(path)!r} cannot be read as a GGUF model: {error}") from error
    config = {key: _shortest(value) for key, value in model.config.to_dict().items()}
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {
            file.name: file.read_bytes()
            for file in Path(folder).iterdir()
            if is_tokenizer_file(file.name)
        }
    files["tokenizer.json"] = _with_pre_tokenizer(files["tokenizer.json"], _pre_name(path))
    settings = json.loads(files["tokenizer_config.json"])
    # Traces of how it was loaded, not of what it is.
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    files["tokenizer_config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    return config, model.state_dict(), files


def _shortest(value: Any) -> Any:
    """GGUF keeps floats in single precision: 9.99999974e-06 was written as 1e-05."""
    return float(str(np.float32(value))) if type(value) is float else value


def _pre_name(path: Path) -> str | None:
    """Name of the rule that splits text before byte-pair merging (``tokenizer.ggml.pre``)."""
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def _with_pre_tokenizer(tokenizer: bytes, pre_name: str | None) -> bytes:
    """Restore the pre-tokenizer, which transformers does not read from GGUF.

    SmolLM splits off every digit before GPT-2's rule, so that spaces before a number are not
    attached to it.
    """
    if pre_name != "smollm":
        return tokenizer
    backend = RustTokenizer.from_buffer(tokenizer)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return backend.to_str(pretty=True).encode()
