"""Low-rank adapters on disk: one safetensors file of canonical names, and merging it into weights.

For every adapted linear, a file contains ``<linear>.lora.a`` [rank, in] and ``<linear>.lora.b``
[out, rank], unsplit and in the layouts of canonical weights. It also contains the head of a critic
or reward model, which is trained together with the adapters. The header states the LoRA settings
(rank, alpha, targets) and the configuration keys for a `.nemo` of the merged weights, except the
keys of its architecture.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import (
    LORA_A,
    LORA_B,
    OUTPUT_LAYER,
    REWARD_HEAD,
    LazyTensors,
    Shape,
    Weights,
    check_shape,
    expected_shapes,
    misfits,
)
from aligner.checkpoint.durable import atomic_file
from aligner.config import LoraConfig
from aligner.errors import CheckpointError, CheckpointNotFoundError, ConfigError, raised_as

SUFFIX = ".lora.safetensors"
# The header's only key: safetensors writes several in random order.
_HEADER = "aligner"
_LORA, _NEMO_KEYS = "lora", "nemo_keys"


@dataclass(frozen=True)
class Adapters:
    """Contents of a file of adapters.

    ``tensors``: canonical name → ``a`` [rank, in] and ``b`` [out, rank] of every adapted linear,
    unsplit, and a trained head. Any float dtype.
    """

    lora: LoraConfig
    tensors: Mapping[str, Tensor]
    nemo_keys: Mapping[str, Any] = field(default_factory=dict)  # for ``model_config.yaml``


def adapter_shapes(architecture: GPTArchitecture, lora: LoraConfig) -> dict[str, Shape]:
    """Return the name and unsplit shape of every adapter matrix of the model, in depth order.

    Raises `ConfigError` if the model has no such linears.
    """
    if architecture.num_moe_experts is not None and any("mlp" in name for name in lora.linears):
        raise ConfigError(
            f"model.peft.lora_tuning.target_modules={list(lora.target_modules)}: this model is a "
            "mixture of experts, and those support adapters in attention only. Set "
            "target_modules=[attention]"
        )
    # Two matrices for each adapted linear.
    shapes: dict[str, Shape] = {}
    for name, shape in expected_shapes(architecture).items():
        linear, _, kind = name.rpartition(".")
        if kind == "weight" and linear.endswith(tuple(lora.linears)):
            outputs, inputs = shape
            if lora.adapter_dim > max(shape):
                raise ConfigError(
                    f"model.peft.lora_tuning.adapter_dim={lora.adapter_dim} exceeds both "
                    f"dimensions of {linear} ({outputs} x {inputs}). Lower it, for adapters "
                    f"smaller than the weights below {min(shape)}"
                )
            shapes[f"{linear}{LORA_A}"] = (lora.adapter_dim, inputs)
            shapes[f"{linear}{LORA_B}"] = (outputs, lora.adapter_dim)
    return shapes


def adapters_beside(weights_path: str) -> Path:
    """Return the path of the adapters that are merged into the weights at ``weights_path``."""
    return Path(f"{weights_path.removesuffix('.nemo').rstrip('/')}{SUFFIX}")


def save_adapters(path: str | os.PathLike[str], adapters: Adapters) -> None:
    """Write a file of adapters atomically. Equal adapters give equal bytes."""
    tensors = {name: tensor.contiguous() for name, tensor in adapters.tensors.items()}
    header = {_LORA: dataclasses.asdict(adapters.lora), _NEMO_KEYS: dict(adapters.nemo_keys)}
    content = save(tensors, metadata={_HEADER: json.dumps(header)})
    with atomic_file(path, len(content)) as stream:
        stream.write(content)


def read_adapters(path: str | os.PathLike[str], architecture: GPTArchitecture) -> Adapters:
    """Read a file of adapters and check that they fit this architecture.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        CheckpointError: the file is damaged, not of this format, or belongs to another model.
    """
    if not Path(path).is_file():
        raise CheckpointNotFoundError(
            f"{str(path)!r} does not exist. Give the *{SUFFIX} that a run with "
            "model.peft.peft_scheme=lora wrote next to its .nemo"
        )
    damage = (SafetensorError, OSError, KeyError, TypeError, ValueError)
    with raised_as(CheckpointError, f"{str(path)!r} is not an adapters file of aligner", *damage):
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described, nemo_keys = header[_LORA], header[_NEMO_KEYS]
        targets = tuple(described.pop("target_modules"))
        lora = LoraConfig(target_modules=targets, **described)
    # The file is intact. Check that it fits the model.
    shapes = adapter_shapes(architecture, lora)
    problems = misfits(set(tensors), set(shapes), set(REWARD_HEAD))
    if problems:
        raise CheckpointError(
            f"adapters in {str(path)!r} belong to another model: {problems}. Give adapters that "
            "were trained on this .nemo or on a model of the same shape"
        )
    for name, shape in shapes.items():
        check_shape(f"{name} in {str(path)!r}", tensors[name].shape, shape)
    return Adapters(lora, tensors, nemo_keys)


def check_same(configured: LoraConfig, saved: LoraConfig, path: str | os.PathLike[str]) -> None:
    """Raise `ConfigError` if the saved rank, alpha or targets differ. Dropout may differ."""
    compared = {"adapter_dim": "adapter_dim", "alpha": "alpha", "target_modules": "linears"}
    for key, attribute in compared.items():
        if getattr(configured, attribute) == getattr(saved, attribute):
            continue
        configured_text, saved_text = (
            f"[{','.join(value)}]" if isinstance(value, tuple) else value
            for value in (getattr(configured, key), getattr(saved, key))
        )
        raise ConfigError(
            f"model.peft.lora_tuning.{key}={configured_text}, but {str(path)!r} was trained with "
            f"{saved_text}. Set {key}={saved_text}"
        )


def add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute ``W + scale · B A`` in float32. Return a new tensor of the weight's shape and dtype.

    ``weight``: float [out, in]. ``a``: float [rank, in]. ``b``: float [out, rank].
    """
    merged = torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)
    return merged.to(weight.dtype)


class MergedWeights(LazyTensors):
    """Canonical weights with adapters. A tensor's adapter is added when the tensor is indexed.

    A head that was trained with the adapters replaces the head of ``weights`` and its output layer.
    """

    def __init__(self, weights: Weights, adapters: Adapters) -> None:
        self._weights, self._adapters = weights, adapters
        heads = [name for name in REWARD_HEAD if name in adapters.tensors]
        replaced = {*heads, OUTPUT_LAYER} if heads else set()
        super().__init__([*(name for name in weights if name not in replaced), *heads])

    def __getitem__(self, name: str) -> Tensor:
        tensors = self._adapters.tensors
        if name in REWARD_HEAD and name in tensors:
            return tensors[name]
        weight, linear = self._weights[name], name.removesuffix(".weight")
        a, b = (tensors.get(f"{linear}{matrix}") for matrix in (LORA_A, LORA_B))
        if a is None or b is None:
            return weight
        return add_product(weight, a, b, self._adapters.lora.scale)
