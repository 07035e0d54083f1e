"""Read Hugging Face directories and GGUF files, and write Hugging Face directories."""

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
from aligner.checkpoint.hf.families import Family, architecture_from_hf, config_to_hf, family_of
from aligner.checkpoint.hf.tensors import LLAMA_TABLE, SCORE, HuggingFaceView, HuggingFaceWeights
from aligner.checkpoint.nemo.config import Config, config_from_architecture
from aligner.data.tokenizers.loading import (
    is_slow,
    load_tokenizer,
    read_files,
    tokenizer_from_files,
)
from aligner.data.tokenizers.tokenizer import (
    GENERATION_CONFIG,
    TOKENIZER_FILES,
    Tokenizer,
    generation_file,
    is_tokenizer_file,
)
from aligner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
    json_object,
    raised_as,
)
from aligner.hub import hub_remedy

_MAX_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class HuggingFaceModel:
    """Model of a Hugging Face directory or a GGUF file. The weights have canonical names."""

    architecture: GPTArchitecture
    weights: HuggingFaceWeights
    tokenizer_files: dict[str, bytes]

    @property
    def config(self) -> Config:
        """Architecture as a configuration with NeMo's keys."""
        return config_from_architecture(self.architecture)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer built from ``tokenizer_files``."""
        return tokenizer_from_files(self.tokenizer_files)


def read_hf(path: str | os.PathLike[str]) -> HuggingFaceModel:
    """Open a Hugging Face directory (``config.json``, safetensors) or a ``.gguf`` file.

    A weight is read when it is indexed. Raises `CheckpointError` if ``path`` is damaged, or has
    another format.
    """
    path = Path(path)
    if path.is_dir():
        config = read_json(path / "config.json")
        state: Weights = SafetensorsFolder(path)
        tokenizer_files = read_tokenizer_files(path, config)
    elif path.suffix == ".gguf" and path.exists():
        from aligner.checkpoint.hf.gguf import read_gguf  # imports transformers

        config, state, tokenizer_files = read_gguf(path)
    else:
        kind = CheckpointError if path.exists() else CheckpointNotFoundError
        problem = "has no supported format" if path.exists() else "does not exist"
        raise kind(
            f"{str(path)!r} {problem}. Give a Hugging Face directory or a .gguf file"
            f"{hub_remedy(str(path))}"
        )
    # Check names of tensors against the architecture. The tensors are read later.
    architecture = architecture_from_hf(config)
    weights = HuggingFaceWeights(state, family_of(architecture.family).table, architecture)
    return HuggingFaceModel(architecture, weights, tokenizer_files)


class SafetensorsFolder(LazyTensors):
    """Tensors of all safetensors files in a directory. A tensor is read when it is indexed."""

    def __init__(self, folder: Path) -> None:
        index, names = folder / _INDEX, ["model.safetensors"]
        weight_map: dict[str, str] | None = None
        if not (folder / names[0]).exists():  # transformers prefers this file to an index
            if not index.exists():
                raise CheckpointError(
                    f"{str(folder)!r} contains no {names[0]}, and pickled weights are not read. "
                    "Save the model with save_pretrained(..., safe_serialization=True)"
                )
            weight_map = _weight_map(index)
            names = sorted(set(weight_map.values()))
        self._files: dict[str, Any] = {}  # open file of each tensor
        for name in names:
            text = f"{str(folder / name)!r} is missing or damaged"
            with raised_as(CheckpointError, text, SafetensorError, OSError):
                file = safe_open(folder / name, framework="pt")
            tensors = list(file.keys())
            unlisted = [] if weight_map is None else sorted(set(tensors) - weight_map.keys())
            if unlisted:
                raise CheckpointError(
                    f"{str(folder / name)!r} contains {unlisted[0]}, but {_INDEX} does not list "
                    "it. Remove the file if it belongs to another model, or restore the index"
                )
            self._files |= dict.fromkeys(tensors, file)
        super().__init__(self._files)

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self._files[key].get_tensor(key)
        return tensor


def _weight_map(index: Path) -> dict[str, str]:
    listed: Any = read_json(index).get("weight_map")
    entries = listed if isinstance(listed, dict) else {"weight_map": listed}
    for key, name in entries.items():
        is_plain = isinstance(name, str) and Path(name).name == name
        if not is_plain or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{str(index)!r} names the file {name!r} for {key}. Only .safetensors files in the "
                "same directory are allowed"
            )
    return entries


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `CheckpointError` if there is none."""
    absent = f"{str(path.parent)!r} contains no {path.name}"
    with raised_as(CheckpointError, absent, FileNotFoundError, remedy="give a model's directory"):
        content = path.read_bytes()
    return json_object(content, CheckpointError, f"{str(path)!r} is not JSON")


def read_tokenizer_files(folder: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return name → content of the tokenizer files in a directory.

    transformers converts other formats to ``tokenizer.json``. If the files lack a list of end
    tokens, it is taken from ``config``, the content of ``config.json``.
    """
    files = read_files(folder, TOKENIZER_FILES)
    if is_slow(folder):
        files |= load_tokenizer(folder).files()
    ends = config.get("eos_token_id")
    if files and GENERATION_CONFIG not in files and isinstance(ends, list):
        files |= generation_file(ends)
    return files


def save_hf(
    folder: str | os.PathLike[str],
    weights: Weights,
    architecture: GPTArchitecture,
    tokenizer_files: Mapping[str, bytes],
    keys: Mapping[str, Any] | None = None,
) -> None:
    """Write a new Hugging Face directory for ``from_pretrained``.

    A reward model is saved as a sequence classifier, a critic as a token classifier. ``keys``:
    the model's settings under the keys of NeMo's configuration. Raises `CheckpointError` if no
    classifier of transformers gives the same scores, and the errors of `new_folder`.
    """
    folder = Path(folder)
    for name in tokenizer_files:
        if not is_tokenizer_file(name):
            raise CheckpointError(
                f"{name!r} in tokenizer_files is not the name of a tokenizer file. Remove it"
            )
    check_names(weights, architecture, "the model to be saved")
    family, config = config_to_hf(architecture)
    is_reward_model = REWARD_HEAD[0] in weights and "reward_model_type" in (keys or {})
    if tokenizer_files:
        tokenizer = tokenizer_from_files(tokenizer_files)
        ends, pad = list(tokenizer.end_ids), tokenizer.pad_id
        config |= {"bos_token_id": tokenizer.bos_id}
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        # transformers scores the last token that is not padding. This must be the end token.
        config["pad_token_id"] = None if is_reward_model and pad in ends else pad
    if REWARD_HEAD[0] in weights:
        config |= _classifier(family, weights, keys if is_reward_model else None)
    view = HuggingFaceView(weights, family.table, architecture)
    # A sequence classifier has no bias. `_classifier` has checked that the bias is 0.
    left_out = [SCORE[REWARD_HEAD[1]]] if is_reward_model else []
    names = [name for name in view if name not in left_out]
    with new_folder(folder) as partial:
        for name, content in tokenizer_files.items():
            (partial / name).write_bytes(content)
        dtype = _write_shards(partial, ((name, view[name]) for name in names))
        config["torch_dtype"] = dtype
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, and rename it to ``folder`` after the block.

    Raises `StorageError` if ``folder`` exists and is not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(
            f"{str(folder)!r} exists and is not empty. Remove it or give another --output"
        )
    # Write under another name and rename.
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


def _classifier(family: Family, weights: Weights, keys: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``config.json`` keys for the head of a reward model, or of a critic (no ``keys``)."""
    if family.table is not LLAMA_TABLE:
        raise CheckpointError(
            f"the model has a reward head (rm_head), which a Hugging Face {family.model_type} "
            "cannot represent. Save it as a .nemo, or convert the policy instead"
        )
    has_offset = bool(((keys or {}).get("reward_standardization") or {}).get("enable"))
    if REWARD_HEAD[1] in weights:
        has_offset |= bool(weights[REWARD_HEAD[1]].any())
    if keys is not None and has_offset:
        raise CheckpointError(
            "the reward head (rm_head) has a bias or standardises rewards, which a sequence "
            "classifier of transformers cannot do. Use the .nemo file itself, as reward.model or "
            "with `aligner serve-reward`, or train the model again with "
            "trainer.reward_model.loss=bradley_terry and trainer.reward_model.standardize_on=null"
        )
    labels = list(((keys or {}).get("regression") or {}).get("attributes") or ["value"])
    kind = "ForTokenClassification" if keys is None else "ForSequenceClassification"
    return {
        "architectures": [family.model_class.replace("ForCausalLM", kind)],
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Write safetensors files of at most 5 GB. Returns the dtype's name, such as ``bfloat16``."""
    names_by_shard: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total_bytes, dtype = 0, ""

    def flush() -> None:
        file = folder / f"shard-{len(names_by_shard)}"
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors makes it readable for the owner only
        names_by_shard.append(list(shard))
        shard.clear()

    # Write a shard before a tensor would make it too large.
    for name, tensor in tensors:
        dtype = dtype or str(tensor.dtype).removeprefix("torch.")
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > _MAX_SHARD_BYTES:
            flush()
        # safetensors refuses tensors that share storage, as parts of one canonical tensor may.
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
        shard[name] = tensor.clone() if is_part else tensor
        total_bytes += tensor.nbytes
    flush()
    # Rename the files: the final names contain the number of files.
    count = len(names_by_shard)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(names_by_shard):
        numbers = "" if count == 1 else f"-{index + 1:05d}-of-{count:05d}"
        file = f"model{numbers}.safetensors"
        (folder / f"shard-{index}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if count > 1:
        content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(content, indent=2) + "\n")
    return dtype
