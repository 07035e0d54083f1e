"""Files of LoRA adapters, and merging of adapters into weights.

A safetensors file contains ``<linear>.lora.a`` [rank, in] and ``<linear>.lora.b`` [out, rank] for
each adapted linear layer, unsplit, and the head of a critic or reward model. Its header contains
the LoRA settings and configuration keys for a `.nemo` file with the merged weights.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from aligner.architecture import GPTArchitecture
from aligner.checkpoint import canonical
from aligner.checkpoint.durable import atomic_file
from aligner.checkpoint.hf.any_model import body_path, empty_model
from aligner.config import LoraConfig
from aligner.config.roles.peft import LINEARS
from aligner.errors import CheckpointError, CheckpointNotFoundError, ConfigError, raised_as

SUFFIX = ".lora.safetensors"
# The header's only key: safetensors writes several in random order.
_HEADER = "aligner"
_LORA, _NEMO_KEYS = "lora", "nemo_keys"


@dataclass(frozen=True)
class Adapters:
    """Contents of a file of adapters.

    ``tensors``: adapter matrices, float, with the names and shapes of `adapter_shapes`. A trained
    head has `REWARD_HEAD`'s weight [K, H] and bias [K], for K outputs and hidden size H.
    """

    lora: LoraConfig
    tensors: Mapping[str, Tensor]
    nemo_keys: Mapping[str, Any] = field(default_factory=dict)  # for ``model_config.yaml``


def adapter_shapes(architecture: GPTArchitecture, lora: LoraConfig) -> dict[str, canonical.Shape]:
    """Return the name and unsplit shape of every adapter matrix, from first to last layer.

    The adapter of a layer's experts has ``a`` [experts, rank, in] and ``b`` [experts, out, rank].
    Raises `ConfigError` if the model does not have the target modules.
    """
    # Adapter name → shape of the adapted weight.
    if architecture.has_table:
        weights = _canonical_weights(architecture, lora)
    else:
        adapted = adapted_weights(empty_model(architecture), lora)
        weights = {weight.adapter: weight.shape for weight in adapted}
    # Two matrices for each adapted linear.
    shapes: dict[str, canonical.Shape] = {}
    for adapter, (*experts, outputs, inputs) in weights.items():
        if lora.adapter_dim > max(outputs, inputs):
            raise ConfigError(
                f"model.peft.lora_tuning.adapter_dim={lora.adapter_dim} exceeds both dimensions of "
                f"{adapter.removesuffix(canonical.LORA)} ({outputs} x {inputs}). Set adapter_dim "
                f"to less than {min(outputs, inputs)}. A larger adapter has no higher rank"
            )
        shapes[f"{adapter}.a"] = (*experts, lora.adapter_dim, inputs)
        shapes[f"{adapter}.b"] = (*experts, outputs, lora.adapter_dim)
    return shapes


def _canonical_weights(
    architecture: GPTArchitecture, lora: LoraConfig
) -> dict[str, canonical.Shape]:
    if unknown := set(lora.target_modules) - LINEARS.keys():
        raise _no_target(unknown.pop(), lora, LINEARS)
    is_latent = architecture.kv_lora_rank is not None
    refused = ("mlp", "linear_qkv") if is_latent else ("mlp",)
    has_refused = any(part in name for name in lora.linears for part in refused)
    if architecture.num_moe_experts is not None and has_refused:
        raise ConfigError(
            f"model.peft.lora_tuning.target_modules={list(lora.target_modules)}: this model is a "
            "mixture of experts, and those support adapters in "
            + ("the output projection of latent attention" if is_latent else "attention")
            + f" only. Set target_modules=[attention{'_dense' if is_latent else ''}]"
        )
    return {
        f"{linear}{canonical.LORA}": shape
        for name, shape in canonical.expected_shapes(architecture).items()
        if (linear := name.removesuffix(".weight")) != name and linear.endswith(tuple(lora.linears))
    }


class AdaptedWeight(NamedTuple):
    """Weight in a transformers model: of a linear layer, or of all experts in a layer."""

    name: str  # of the linear module, or of the experts' parameter
    shape: canonical.Shape  # [out, in], or [experts, out, in]
    is_transposed: bool  # stored as [in, out]

    @property
    def parameter(self) -> str:
        """Name of the parameter in the model."""
        return self.name if self.is_of_experts else f"{self.name}.weight"

    @property
    def adapter(self) -> str:
        """Name of the module that contains the matrices A and B."""
        return f"{self.name}{'_lora' if self.is_of_experts else canonical.LORA}"

    @property
    def is_of_experts(self) -> bool:
        """Whether the weight has a leading axis of experts."""
        return len(self.shape) > 2

    def merged(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return ``weight + scale * b @ a`` in the layout and dtype of ``weight``.

        ``weight``: the model's parameter. ``a``: float [..., rank, in]. ``b``: float
        [..., out, rank].
        """
        return add_product(weight, *((b.mT, a.mT) if self.is_transposed else (a, b)), scale)


def adapted_weights(model: nn.Module, lora: LoraConfig) -> list[AdaptedWeight]:
    """Return the weights of a transformers causal language model that get adapters.

    Raises `ConfigError` if a name in ``lora.target_modules`` matches no weight of the model.
    """
    from transformers.pytorch_utils import Conv1D

    body = body_path(model)
    weights: list[AdaptedWeight] = []
    seen_parameters: set[nn.Parameter] = set()
    for path, module in model.get_submodule(body).named_modules(prefix=body):
        is_transposed = isinstance(module, Conv1D) or getattr(module, "is_transposed", False)
        for leaf, parameter in module.named_parameters(recurse=False):
            is_linear = leaf == "weight" and isinstance(module, nn.Linear | Conv1D)
            is_of_experts = parameter.dim() == 3 and "Expert" in type(module).__name__
            if (is_linear or is_of_experts) and parameter not in seen_parameters:
                seen_parameters.add(parameter)
                name = path if is_linear else f"{path}.{leaf}"
                shape = tuple(parameter.mT.shape if is_transposed else parameter.shape)
                weights.append(AdaptedWeight(name, shape, is_transposed))
    # A target selects all weights whose names contain it.
    selected_names: set[str] = set()
    for target in lora.target_modules:
        matches = {weight.name for weight in weights if is_target(target, weight.name)}
        if not matches:
            raise _no_target(target, lora, ["all", *suffixes((w.name for w in weights), 1)])
        selected_names |= matches
    return [weight for weight in weights if weight.name in selected_names]


def is_target(target: str, name: str) -> bool:
    """Return whether ``target`` is "all", or a part of the dotted ``name`` of a weight."""
    return target == "all" or f".{target}." in f".{name}."


def _no_target(target: str, lora: LoraConfig, names: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"model.peft.lora_tuning.target_modules=[{','.join(lora.target_modules)}]: no linear layer "
        f"of this model is named {target!r}. Use names among {', '.join(names)}"
    )


def suffixes(names: Iterable[str], length: int) -> list[str]:
    """Return the last ``length`` parts of each dotted name, sorted and without duplicates."""
    return sorted({".".join(name.split(".")[-length:]) for name in names})


def distinct_suffixes(selected: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the last part, or two parts, of ``selected`` names, by which ``others`` differ."""
    chosen, rest = suffixes(selected, 2), suffixes(others, 2)
    unselected = set(rest) - set(chosen)
    short = suffixes(chosen, 1)
    return chosen if set(short) & set(suffixes(unselected, 1)) else short


def adapters_beside(weights_path: str) -> Path:
    """Return the path of the adapters file next to the merged weights at ``weights_path``."""
    return Path(f"{weights_path.removesuffix('.nemo').rstrip('/')}{SUFFIX}")


def save_adapters(path: str | os.PathLike[str], adapters: Adapters) -> None:
    """Write a file of adapters, all of it or nothing. Equal adapters give equal bytes."""
    tensors = {name: tensor.contiguous() for name, tensor in adapters.tensors.items()}
    header = {_LORA: dataclasses.asdict(adapters.lora), _NEMO_KEYS: dict(adapters.nemo_keys)}
    content = save(tensors, metadata={_HEADER: json.dumps(header)})
    with atomic_file(path, len(content)) as stream:
        stream.write(content)


def read_adapters(path: str | os.PathLike[str], architecture: GPTArchitecture) -> Adapters:
    """Read a file of adapters and check that they fit this architecture.

    Raises `CheckpointError` if the file is absent, damaged, or belongs to another model.
    """
    adapters = _read(path)
    tensors, shapes = adapters.tensors, adapter_shapes(architecture, adapters.lora)
    problems = canonical.misfits(set(tensors), set(shapes), set(canonical.REWARD_HEAD))
    if problems:
        raise CheckpointError(
            f"adapters in {str(path)!r} belong to another model: {problems}. Give adapters that "
            "were trained on this model or on a model of the same shape"
        )
    for name, shape in shapes.items():
        canonical.check_shape(f"{name} in {str(path)!r}", tensors[name].shape, shape)
    return adapters


def _read(path: str | os.PathLike[str]) -> Adapters:
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
        return Adapters(LoraConfig(target_modules=targets, **described), tensors, nemo_keys)


def backend_of(path: str | os.PathLike[str]) -> str:
    """Return the ``policy.backend`` that wrote a file of adapters, found from its tensor names."""
    is_canonical = any(name.startswith("decoder.layers.") for name in _read(path).tensors)
    return "megatron" if is_canonical else "dtensor"


def tensors_to_continue(
    path: str | os.PathLike[str], architecture: GPTArchitecture, lora: LoraConfig, has_head: bool
) -> Mapping[str, Tensor]:
    """Read adapter tensors with which training continues.

    Raises an error if the file's model, its LoRA settings or its head do not fit this model.
    """
    adapters = read_adapters(path, architecture)
    check_same(lora, adapters.lora, path)
    if canonical.REWARD_HEAD[0] in adapters.tensors and not has_head:
        raise CheckpointError(
            f"{str(path)!r} was trained with a head (rm_head), as critics and reward models have. "
            "This model has no head. Give the adapters of a policy"
        )
    return adapters.tensors


def check_same(configured: LoraConfig, saved: LoraConfig, path: str | os.PathLike[str]) -> None:
    """Raise `ConfigError` if rank, alpha or target modules differ. Dropout may differ."""
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
    """Compute ``weight + scale * b @ a`` in float32. Returns a new tensor of the weight's dtype.

    ``weight``: float [..., out, in]. ``a``: float [..., rank, in]. ``b``: float [..., out, rank].
    """
    add = torch.addmm if weight.dim() == 2 else torch.baddbmm
    return add(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


class MergedWeights(canonical.LazyTensors):
    """Canonical weights with merged adapters. An adapter is added when its weight is indexed.

    If the adapters include a head, it replaces the head and the output layer of ``weights``.
    """

    def __init__(self, weights: canonical.Weights, adapters: Adapters) -> None:
        self._weights, self._adapters = weights, adapters
        heads = [name for name in canonical.REWARD_HEAD if name in adapters.tensors]
        replaced = {*heads, canonical.OUTPUT_LAYER} if heads else set()
        super().__init__([*(name for name in weights if name not in replaced), *heads])

    def __getitem__(self, name: str) -> Tensor:
        tensors = self._adapters.tensors
        if name in canonical.REWARD_HEAD and name in tensors:
            return tensors[name]
        weight, linear = self._weights[name], name.removesuffix(".weight")
        a, b = (tensors.get(f"{linear}{matrix}") for matrix in (canonical.LORA_A, canonical.LORA_B))
        if a is None or b is None:
            return weight
        return add_product(weight, a, b, self._adapters.lora.scale)
