"""Read GGUF files and dequantise their tensors to float32.

A key or tensor of a file that cannot be used raises an error.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aligner.checkpoint.canonical import LazyTensors
from aligner.checkpoint.hf.families import family_of
from aligner.data.tokenizers.gguf import gguf_tokenizer_files, gguf_values
from aligner.errors import CheckpointError, raised_as

# general.architecture → model_type. A llama with a window becomes a mistral (`_family`).
_MODEL_TYPES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gpt2")},
    "qwen3moe": "qwen3_moe",
}
# Keys after the architecture's prefix → keys of config.json.
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Keys that may be ignored at any value.
_UNUSED = (
    *("tensor_data_layout", "rope.scaling.finetuned"),
    *("split.no", "split.count", "split.tensors.count"),  # of files with one part
)
# Keys that may be ignored at these values.
_ZERO = (
    *("expert_count", "expert_used_count", "expert_shared_count", "attention.sliding_window"),
    *("attention.max_alibi_bias", "attention.clamp_kqv", "attention.scale"),
    *("final_logit_softcapping", "attn_logit_softcapping"),
)
_SCALES = (
    *("expert_weights_scale", "expert_gating_func", "logit_scale", "residual_scale"),
    *("embedding_scale", "rope.scaling.factor", "rope.scale_linear"),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ZERO, (0,)),
    **dict.fromkeys(_SCALES, (0, 1)),
    **dict.fromkeys(("attention.causal", "expert_weights_norm"), (True,)),
    "use_parallel_residual": (False,),
    "rope.scaling.type": ("none",),
    "rope.scaling.attn_factor": (1.0,),
}
# Keys of the file format, and keys that `aligner.data.tokenizers.gguf` checks.
_ELSEWHERE = ("GGUF.", "general.", "tokenizer.", "quantize.")

_BLOCK = re.compile(r"^blk\.(\d+)\.")
_ROPE_FACTORS = "rope_freqs.weight"


def read_gguf(path: Path) -> tuple[dict[str, Any], Mapping[str, Tensor], dict[str, bytes]]:
    """Convert a GGUF file to the content of a Hugging Face directory.

    Returns the content of ``config.json``, name → float32 tensor (read when it is indexed), and
    name → content of the tokenizer files. Raises `CheckpointError` if the file is damaged, or has
    an unsupported key or tensor.
    """
    reader, values = gguf_values(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with raised_as(CheckpointError, repr(str(path)), CheckpointError):
        config = _config(values, tensors)
    names = _names(values["general.architecture"], config["model_type"])
    return config, GGUFTensors(tensors, config, names), gguf_tokenizer_files(path)


def _names(architecture: str, model_type: str) -> dict[str, str]:
    """Map GGUF names to Hugging Face modules. ``{n}`` is the layer number, ``{e}`` the expert."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    gguf_names = get_tensor_name_map(kind, n_blocks=1)
    names = {}
    for _, modules in family_of(model_type).table.values():
        for module in modules:
            name = gguf_names.get_name(module.replace("{n}", "0").replace(".{e}", ""))
            if name is not None:
                names[_BLOCK.sub("blk.{n}.", name)] = module
    return names


def _config(values: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    architecture, kind = values.get("general.architecture"), values.get("general.type", "model")
    prefix = f"{architecture}."
    settings = {
        # Floats have single precision: the value 1e-05 is read as 9.99999974e-06.
        key.removeprefix(prefix): float(str(np.float32(v))) if isinstance(v, float) else v
        for key, v in values.items()
        if not key.startswith(_ELSEWHERE)
    }
    # Check the properties that every supported file has.
    missing_keys = [prefix + key for key in _SIZES if not isinstance(settings.get(key), int)]
    problem = ""
    if architecture not in _MODEL_TYPES or kind != "model":
        problem = (
            f"general.architecture={architecture!r} of general.type={kind!r} is not supported. "
            f"Supported: models of {', '.join(_MODEL_TYPES)}"
        )
    elif settings.get("split.count", 1) != 1:
        problem = (
            f"the file is one of split.count={settings['split.count']} parts. Join them with "
            "`llama-gguf-split --merge` and give the joined file"
        )
    elif missing_keys:
        problem = f"{', '.join(missing_keys)} must be present, each with one integer"
    elif "token_embd.weight" not in tensors:
        problem = "the tensor token_embd.weight is missing"
    if problem:
        raise CheckpointError(problem)
    for key in _UNUSED:
        settings.pop(key, None)
    for key, neutral in _NEUTRAL.items():
        if settings.get(key, []) in neutral:
            settings.pop(key, None)
    config = {ours: settings.pop(key) for key, ours in _SIZES.items()}
    config |= {ours: settings.pop(key) for key, ours in _OPTIONAL.items() if key in settings}
    # Sizes of heads and of the vocabulary. Unequal head sizes stay in ``settings`` and are refused.
    head = settings.pop("attention.key_length", None)
    head = head or config["hidden_size"] // config["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.get(key) == head:
            del settings[key]
    rows = int(tensors["token_embd.weight"].shape[-1])
    config |= {"head_dim": head, "vocab_size": settings.pop("vocab_size", rows)}
    config |= {"tie_word_embeddings": "output.weight" not in tensors}
    # The remaining keys depend on the family. Unused keys are refused.
    config |= _family(str(architecture), config, settings, tensors)
    config |= _rope(settings, config, tensors)
    if settings:
        raise CheckpointError(
            f"{', '.join(f'{prefix}{key}={value!r:.40}' for key, value in settings.items())}: not "
            "supported. Give the Hugging Face directory of the model instead of the GGUF file"
        )
    return config


def _family(
    architecture: str, config: dict[str, Any], settings: dict[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    kind = _MODEL_TYPES[architecture]
    if kind == "llama" and "sliding_window" in config:
        return {"model_type": "mistral"}
    if kind == "qwen3_moe":
        experts = settings.pop("expert_count", None)
        return {"model_type": kind, "num_experts": experts, "norm_topk_prob": True}
    if kind == "gpt2":
        llama = family_of("llama").keys
        gpt2 = {llama.get(field): key for field, key in family_of(kind).keys.items()}
        moved = {gpt2[ours]: config.pop(ours) for ours in _SIZES.values()}
        epsilon = settings.pop("attention.layer_norm_epsilon", 1e-5)
        return {**moved, "model_type": kind, "layer_norm_epsilon": epsilon}
    if kind != "llama":
        return {"model_type": kind}
    # A llama has biases in all projections or in none.
    biases = [name for name in tensors if name.endswith(".bias")]
    if len(biases) not in (0, 7 * config["num_hidden_layers"]):  # q, k, v, output, gate, up, down
        raise CheckpointError(
            f"{biases[0]}: this llama model has biases in some projections only, which is not "
            "supported. Give a model with biases in all projections or in none"
        )
    return {"model_type": kind, "attention_bias": bool(biases), "mlp_bias": bool(biases)}


def _rope(
    settings: dict[str, Any], config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``rope_scaling``. The keys of linear scaling are removed from ``settings``."""
    # Linear scaling. Its older key is rope.scale_linear.
    older_factor = settings.pop("rope.scale_linear", None)
    factor = settings.pop("rope.scaling.factor", older_factor)
    kind = settings.get("rope.scaling.type", "linear")
    has_factors = _ROPE_FACTORS in tensors
    if factor is not None and kind == "linear" and not has_factors:
        settings.pop("rope.scaling.type", None)
        settings.pop("rope.scaling.original_context_length", None)  # of the model before scaling
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if factor is not None:
        settings["rope.scaling.factor"] = factor  # the caller refuses keys that remain
    if not has_factors:
        return {}
    # Llama 3's scaling: a tensor has the factor of each frequency, but not the settings.
    factors = np.asarray(tensors[_ROPE_FACTORS].data, dtype=np.float64)
    head, base = config["head_dim"], config.get("rope_theta", 10_000.0)
    wavelengths = 2 * np.pi * float(base) ** (np.arange(0, head, 2) / head)
    factor = float(np.float32(factors.max()))
    # Find the original context length that gives these factors. Meta's is 8192.
    for original in (8192, *(2**power for power in range(3, 24))):
        smooth = np.clip((original / wavelengths - 1.0) / 3.0, 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            llama3 = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
            llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": original}
            return {"rope_scaling": llama3} if factor != 1.0 else {}
    raise CheckpointError(
        f"the tensor {_ROPE_FACTORS} does not have the values of llama3's rope scaling, the only "
        "supported one. Give the Hugging Face directory of the model instead of the GGUF file"
    )


class GGUFTensors(LazyTensors):
    """Tensors by Hugging Face name, dequantised to float32 when they are indexed."""

    def __init__(
        self, tensors: Mapping[str, Any], config: Mapping[str, Any], names: Mapping[str, str]
    ) -> None:
        self._config = config
        self._sources: dict[str, tuple[Any, int | None]] = {}  # tensor and index of the expert
        for name, tensor in tensors.items():
            if name == _ROPE_FACTORS and "rope_scaling" in config:
                continue
            module, _, leaf = _BLOCK.sub("blk.{n}.", name).rpartition(".")
            layer = _BLOCK.match(name)
            target = f"{names[module]}.{leaf}" if module in names else name
            target = target.replace("{n}", layer[1] if layer else "")
            # A tensor of experts is split into one tensor per expert.
            if "{e}" not in target:
                self._sources[target] = tensor, None
                continue
            for expert in range(int(tensor.shape[-1])):
                self._sources[target.replace("{e}", str(expert))] = tensor, expert
        super().__init__(self._sources)

    def __getitem__(self, name: str) -> Tensor:
        from gguf import dequantize

        tensor, expert = self._sources[name]
        data = tensor.data if expert is None else tensor.data[expert]
        text = f"{tensor.name} of the GGUF file"
        with raised_as(CheckpointError, text, NotImplementedError, ValueError):
            array = dequantize(data, tensor.tensor_type)
        value = torch.from_numpy(np.array(array, dtype=np.float32))
        if self._config["model_type"] in ("llama", "mistral"):
            heads = self._config["num_attention_heads"]
            counts = {"q_proj": heads, "k_proj": self._config.get("num_key_value_heads", heads)}
            count = counts.get(name.split(".")[-2])
            if count is not None:  # llama.cpp interleaves the two rotated halves of each head
                pairs = value.reshape(count, -1, 2, *value.shape[1:])
                value = pairs.transpose(1, 2).reshape(value.shape)
        # GPT-2 stores weights transposed.
        is_conv = self._config["model_type"] == "gpt2" and ".c_" in name and value.dim() == 2
        return value.T.contiguous() if is_conv else value
