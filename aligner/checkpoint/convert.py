"""Conversion of models to other file formats. Each function returns a one-line summary."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import Adapters, MergedWeights, backend_of, read_adapters
from aligner.checkpoint.canonical import expected_shapes
from aligner.checkpoint.durable import readable_bytes
from aligner.checkpoint.hf.model_folder import read_hf, save_hf
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.checkpoint.peft import save_peft
from aligner.config.fields import ModelPath
from aligner.config.parse import build
from aligner.errors import ConfigError

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class _Source:
    input: ModelPath
    download: bool


def convert(source: StrPath, target: StrPath, *, download: bool = False) -> str:
    """Convert a ``.nemo`` file to a Hugging Face directory, and any other model to ``.nemo``.

    ``source``: a path, or the name of a model on Hugging Face's hub. A model of the hub must be in
    the local cache, unless ``download`` is true.
    """
    source = build(_Source, {"input": os.fspath(source), "download": download}).input
    to_nemo, from_nemo = (Path(path).suffix == ".nemo" for path in (target, source))
    if to_nemo == from_nemo:
        raise ConfigError(
            f"--input {source} and --output {target}: "
            + ("both are" if to_nemo else "neither is")
            + " a .nemo. Give FILE.nemo for one of the two options, and a Hugging Face directory "
            "(or, as input, a .gguf file) for the other"
        )
    return hf_to_nemo(source, target) if to_nemo else nemo_to_hf(source, target)


def hf_to_nemo(source: StrPath, target: StrPath) -> str:
    """Convert a Hugging Face directory or a ``.gguf`` file to a ``.nemo``."""
    model = read_hf(source)
    save_nemo(target, model.weights, model.architecture, model.tokenizer_files)
    return _summary(target, describe(model.architecture))


def nemo_to_hf(source: StrPath, target: StrPath) -> str:
    """Convert a ``.nemo`` to a Hugging Face directory."""
    with open_nemo(source) as nemo:
        save_hf(target, nemo.weights, nemo.architecture, nemo.tokenizer_files, nemo.config)
        return _summary(target, describe(nemo.architecture))


def merge_lora(model: StrPath, adapters: StrPath, target: StrPath) -> str:
    """Merge a run's adapters into its initial model, and write the result as a ``.nemo``.

    ``model``: ``.nemo``, Hugging Face directory or ``.gguf`` file of the initial model.
    ``adapters``: adapters file of the run.
    """
    with open_model(model) as nemo:
        lora = read_adapters(adapters, nemo.architecture)
        merged = MergedWeights(nemo.weights, lora)
        files = nemo.tokenizer_files
        save_nemo(target, merged, nemo.architecture, files, extra_config=lora.nemo_keys)
        return _summary(target, f"{describe(nemo.architecture)}, with {_adapters(lora)} merged in")


def lora_to_peft(
    model: StrPath, adapters: StrPath, target: StrPath, base_model: str | None = None
) -> str:
    """Convert a run's adapters to a directory for Hugging Face's PEFT.

    ``model``: ``.nemo``, Hugging Face directory or ``.gguf`` file of the run's initial model.
    ``base_model``: name or path of the model to which PEFT adds the adapters.
    """
    with open_model(model, backend_of(adapters), adapted=True) as source:
        architecture = source.architecture
    lora = read_adapters(adapters, architecture)
    save_peft(target, lora, architecture, base_model)
    return _summary(target, _adapters(lora))


def describe(architecture: GPTArchitecture) -> str:
    """Return a short text about a model's family and sizes."""
    parameters = sum(math.prod(shape) for shape in expected_shapes(architecture).values())
    experts = architecture.num_moe_experts
    return (
        f"{architecture.family or 'GPT'}, {_count(parameters)} parameters, "
        f"{architecture.num_layers} layers of {architecture.hidden_size}, "
        + ("" if experts is None else f"{experts} experts, ")
        + f"vocabulary {architecture.vocab_size}"
    )


def _summary(target: StrPath, contents: str) -> str:
    path = Path(target)
    files = path.rglob("*") if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.is_file())
    return f"wrote {target}: {contents} ({readable_bytes(size)})"


def _adapters(adapters: Adapters) -> str:
    lora = adapters.lora
    return (
        f"LoRA adapters of rank {lora.adapter_dim} (alpha {lora.alpha:g}) on "
        f"{', '.join(lora.target_modules)}"
    )


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
