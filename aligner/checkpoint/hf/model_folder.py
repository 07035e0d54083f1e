"""Hugging Face model directories (safetensors) in and out, GGUF files in."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import REWARD_HEAD, LazyTensors, Weights, check_names
from aligner.checkpoint.durable import sync_path, sync_tree
from aligner.checkpoint.hf.families import (
    Family,
    architecture_from_hf,
    config_to_hf,
    family_of,
)
from aligner.checkpoint.hf.tensors import LLAMA_TABLE, HuggingFaceView, HuggingFaceWeights
from aligner.checkpoint.nemo.config import Config, config_from_architecture
from aligner.data.tokenizers.loading import (
    fold_named_templates,
    is_slow,
    load_tokenizer,
    tokenizer_from_files,
)
from aligner.data.tokenizers.tokenizer import (
    GENERATION_CONFIG,
    TOKENIZER_FILES,
    Tokenizer,
    is_tokenizer_file,
)
from aligner.errors import CheckpointError, CheckpointNotFoundError, StorageError, raised_as

_MAX_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class HuggingFaceModel:
    """Contents of a directory or GGUF file: canonical weights and the tokenizer's files."""

    architecture: GPTArchitecture
    weights: HuggingFaceWeights
    tokenizer_files: dict[str, bytes]

    @property
    def config(self) -> Config:
        """The architecture under NeMo's keys."""
        return config_from_architecture(self.architecture)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that these files describe."""
        return tokenizer_from_files(self.tokenizer_files)


def read_hf(path: str | os.PathLike[str]) -> HuggingFaceModel:
    """Open a Hugging Face directory (``config.json``, safetensors) or a ``.gguf`` file."""
    path = Path(path)
    if not path.exists():
        raise CheckpointNotFoundError(
            f"{str(path)!r} does not exist; give a Hugging Face directory or a .gguf file"
        )
    if path.is_dir():
        config = _read_json(path / "config.json")
        state: Weights = SafetensorsFolder(path)
        tokenizer_files = _tokenizer_files(path, config)
    elif path.suffix == ".gguf":
        from aligner.checkpoint.hf.gguf import read_gguf  # brings in transformers

        config, state, tokenizer_files = read_gguf(path)
    else:
        raise CheckpointError(f"{str(path)!r} is neither a Hugging Face directory nor a .gguf file")
    architecture = architecture_from_hf(config)
    weights = HuggingFaceWeights(state, family_of(architecture.family).table, architecture)
    return HuggingFaceModel(architecture, weights, tokenizer_files)


class SafetensorsFolder(LazyTensors):
    """All tensors of a directory's safetensors files, memory-mapped and read when indexed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open_files: dict[str, Any] = {}
        index = folder / _INDEX
        if (folder / "model.safetensors").exists():  # transformers reads it before an index
            self._files = dict.fromkeys(self._keys("model.safetensors"), "model.safetensors")
        elif index.exists():
            self._files = _weight_map(index)
            for name in sorted(set(self._files.values())):
                unlisted = sorted(set(self._keys(name)) - self._files.keys())
                if unlisted:
                    raise CheckpointError(
                        f"{str(folder / name)!r} holds {unlisted[0]}, which {_INDEX} does not "
                        "list; the files are of two models, or the index is damaged"
                    )
        else:
            raise CheckpointError(
                f"{str(folder)!r} holds no model.safetensors; pickled weights are not read, "
                "save the model with save_pretrained(..., safe_serialization=True)"
            )
        super().__init__(self._files)

    def _keys(self, name: str) -> list[str]:
        with _damage_named(self._folder / name):
            return list(self._open(name).keys())

    def _open(self, name: str) -> Any:
        if name not in self._open_files:
            self._open_files[name] = safe_open(self._folder / name, framework="pt")
        return self._open_files[name]

    def __getitem__(self, key: str) -> Tensor:
        name = self._files[key]
        with _damage_named(self._folder / name):
            tensor: Tensor = self._open(name).get_tensor(key)
        return tensor


def _damage_named(path: Path) -> contextlib.AbstractContextManager[None]:
    text = f"{str(path)!r} is missing or damaged"
    return raised_as(CheckpointError, text, SafetensorError, OSError)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor → name of the file beside ``index`` that holds it."""
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{str(index)!r} holds no mapping weight_map of tensors to files")
    for key, name in listed.items():
        plain = isinstance(name, str) and Path(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{str(index)!r} names the file {name!r} for {key}; a .safetensors file beside it "
                "is expected"
            )
    return listed


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{str(path.parent)!r} holds no {path.name}; is it a Hugging Face model directory?"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} does not hold a JSON object")
    return content


def _tokenizer_files(folder: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """The directory's own, and what they leave to transformers or to ``config.json``."""
    files = {
        name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()
    }
    files = fold_named_templates(folder, files)
    if is_slow(folder):
        files |= load_tokenizer(folder).files()
    ends = config.get("eos_token_id")
    if files and GENERATION_CONFIG not in files and isinstance(ends, list):
        files[GENERATION_CONFIG] = json.dumps({"eos_token_id": ends}).encode()
    return files


def save_hf(
    folder: str | os.PathLike[str],
    weights: Weights,
    architecture: GPTArchitecture,
    tokenizer_files: Mapping[str, bytes],
) -> None:
    """Write a Hugging Face directory that ``from_pretrained`` loads; it appears complete or not.

    The directory must not exist yet, or be empty.
    """
    folder = Path(folder)
    for name in tokenizer_files:
        if not is_tokenizer_file(name):
            raise CheckpointError(f"{name!r} is a file which no tokenizer has; it is not written")
    check_names(weights, architecture, "the model to be saved")
    family, config = config_to_hf(architecture)
    if REWARD_HEAD[0] in set(weights):
        config |= _classifier(family)
    with new_folder(folder) as partial:
        for name, content in tokenizer_files.items():
            (partial / name).write_bytes(content)
        config |= _special_ids(tokenizer_files)
        dtype = _write_shards(partial, HuggingFaceView(weights, family.table, architecture).items())
        config["torch_dtype"] = dtype
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name ``folder`` once the block is left without an error.

    `StorageError` where the folder is there already and not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(
            f"{str(folder)!r} exists and is not empty; remove it or give another --output"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    text, remedy = f"cannot write {str(folder)!r}", "free space or choose a writable directory"
    try:
        with raised_as(StorageError, text, OSError, SafetensorError, remedy=remedy):
            partial.mkdir(parents=True)
            yield partial
            sync_tree(partial)
            os.replace(partial, folder)
            sync_path(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _classifier(family: Family) -> dict[str, Any]:
    """``config.json`` settings of a body with a scalar head: a token classifier of one label."""
    if family.table is not LLAMA_TABLE:
        raise CheckpointError(
            f"the model has a reward head (rm_head), which a Hugging Face {family.model_type} "
            "cannot carry in our form; save it as a .nemo, or convert the policy instead"
        )
    name = family.model_class.replace("ForCausalLM", "ForTokenClassification")
    return {"architectures": [name], "id2label": {"0": "value"}, "label2id": {"value": 0}}


def _special_ids(tokenizer_files: Mapping[str, bytes]) -> dict[str, int | list[int] | None]:
    """``eos_token_id`` is a list where several tokens end a response, as transformers has it."""
    if not tokenizer_files:
        return {}
    tokenizer = tokenizer_from_files(tokenizer_files)
    ends = list(tokenizer.end_ids)
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends if len(ends) > 1 else ends[0],
        "pad_token_id": tokenizer.pad_id,
    }


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Write safetensors, in several files where one would be too large; returns the dtype."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    dtype = ""

    def flush() -> None:
        file = folder / f"shard-{len(shards)}"
        save_file(held, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors lets only the owner read it
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        dtype = dtype or str(tensor.dtype).removeprefix("torch.")
        if held and size + tensor.nbytes > _MAX_SHARD_BYTES:
            flush()
            size = 0
        # safetensors refuses tensors that share storage, as parts of one canonical tensor may.
        held[name] = tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        part = "" if len(shards) == 1 else f"-{number + 1:05d}-of-{len(shards):05d}"
        file = f"model{part}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return dtype
