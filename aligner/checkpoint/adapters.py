"""Low-rank adapters on disk: one safetensors file of canonical names, and merging it into weights.

A file holds, of every adapted linear, ``<linear>.lora.a`` [rank, in] and ``<linear>.lora.b``
[out, rank], whole, in the layouts of canonical weights; and the head of a critic or reward model,
which is trained beside them. What the matrices mean (rank, alpha, targets) is in its header, and
the keys of a `.nemo` of the merged weights beyond its architecture.
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
    """Contents of a file.

    ``tensors``: of every adapted linear ``a`` [rank, in] and ``b`` [out, rank], whole, and a
    trained head, under canonical names; of any float dtype.
    """

    lora: LoraConfig
    tensors: Mapping[str, Tensor]
    nemo_keys: Mapping[str, Any] = field(default_factory=dict)  # for ``model_config.yaml``


def adapter_shapes(architecture: GPTArchitecture, lora: LoraConfig) -> dict[str, Shape]:
    """Name and whole shape of every adapter matrix of the model, in depth order.

    ``ConfigError`` where the model has no such linears.
    """
    if architecture.num_moe_experts is not None and any("mlp" in name for name in lora.linears):
        raise ConfigError(
            f"model.peft.lora_tuning.target_modules={list(lora.target_modules)}: this model is a "
            "mixture of experts, which takes adapters in its attention only; set "
            "target_modules=[attention]"
        )
    shapes: dict[str, Shape] = {}
    for name, shape in expected_shapes(architecture).items():
        linear, _, kind = name.rpartition(".")
        if kind == "weight" and linear.endswith(tuple(lora.linears)):
            outputs, inputs = shape
            if lora.adapter_dim > max(shape):
                raise ConfigError(
                    f"model.peft.lora_tuning.adapter_dim={lora.adapter_dim} is more than {linear} "
                    f"of {outputs} x {inputs} has rows or columns; lower it, below "
                    f"{min(shape)} for adapters smaller than the weights"
                )
            shapes[f"{linear}{LORA_A}"] = (lora.adapter_dim, inputs)
            shapes[f"{linear}{LORA_B}"] = (outputs, lora.adapter_dim)
    return shapes


def adapters_beside(weights_path: str) -> Path:
    """Path of the adapters that are merged into the weights at this path."""
    return Path(f"{weights_path.removesuffix('.nemo').rstrip('/')}{SUFFIX}")


def save_adapters(path: str | os.PathLike[str], adapters: Adapters) -> None:
    """Write a file: atomic, and the same bytes for the same adapters."""
    tensors = {name: tensor.contiguous() for name, tensor in adapters.tensors.items()}
    header = {_LORA: dataclasses.asdict(adapters.lora), _NEMO_KEYS: dict(adapters.nemo_keys)}
    content = save(tensors, metadata={_HEADER: json.dumps(header)})
    with atomic_file(path, len(content)) as stream:
        stream.write(content)


def read_adapters(path: str | os.PathLike[str], architecture: GPTArchitecture) -> Adapters:
    """Read a file and check that it is made for this architecture.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: it is damaged, something else, or of another model.
    """
    if not Path(path).is_file():
        raise CheckpointNotFoundError(
            f"{str(path)!r} does not exist; give the *{SUFFIX} that a run with "
            "model.peft.peft_scheme=lora wrote beside its .nemo"
        )
    damage = (SafetensorError, OSError, KeyError, TypeError, ValueError)
    with raised_as(CheckpointError, f"{str(path)!r} does not hold adapters of ours", *damage):
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described, nemo_keys = header[_LORA], header[_NEMO_KEYS]
        targets = tuple(described.pop("target_modules"))
        lora = LoraConfig(target_modules=targets, **described)
    shapes = adapter_shapes(architecture, lora)
    problems = misfits(set(tensors), set(shapes), set(REWARD_HEAD))
    if problems:
        raise CheckpointError(
            f"adapters in {str(path)!r} are of another model: {problems}; give those that were "
            "trained on this .nemo, or its relatives of the same shape"
        )
    for name, shape in shapes.items():
        check_shape(f"{name} in {str(path)!r}", tensors[name].shape, shape)
    return Adapters(lora, tensors, nemo_keys)


def check_same(configured: LoraConfig, found: LoraConfig, path: str | os.PathLike[str]) -> None:
    """Refuse adapters of another rank, alpha or targets than are configured; dropout may differ."""
    compared = {"adapter_dim": "adapter_dim", "alpha": "alpha", "target_modules": "linears"}
    for key, attribute in compared.items():
        if getattr(configured, attribute) == getattr(found, attribute):
            continue
        given, trained = (
            f"[{','.join(value)}]" if isinstance(value, tuple) else value
            for value in (getattr(configured, key), getattr(found, key))
        )
        raise ConfigError(
            f"model.peft.lora_tuning.{key}={given}, and {str(path)!r} was trained with {trained}; "
            f"set {key}={trained}"
        )


def add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``W + scale · B A``: a new tensor of the weight's shape and dtype, added in float32.

    ``weight``: float [out, in]; ``a``: float [rank, in]; ``b``: float [out, rank].
    """
    merged = torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)
    return merged.to(weight.dtype)


class MergedWeights(LazyTensors):
    """Canonical weights with adapters added, each when it is indexed.

    A head that was trained beside the adapters stands for the weights' own, and for the output
    layer.
    """

    def __init__(self, weights: Weights, adapters: Adapters) -> None:
        self._weights, self._adapters = weights, adapters
        heads = [name for name in REWARD_HEAD if name in adapters.tensors]
        replaced = {*heads, OUTPUT_LAYER} if heads else set()
        super().__init__([*(name for name in weights if name not in replaced), *heads])

    def __getitem__(self, name: str) -> Tensor:
        added = self._adapters.tensors
        if name in REWARD_HEAD and name in added:
            return added[name]
        weight, linear = self._weights[name], name.removesuffix(".weight")
        a, b = (added.get(f"{linear}{matrix}") for matrix in (LORA_A, LORA_B))
        if a is None or b is None:
            return weight
        return add_product(weight, a, b, self._adapters.lora.scale)
