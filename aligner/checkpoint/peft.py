"""Export LoRA adapters in the format of Hugging Face's PEFT, for ``PeftModel.from_pretrained``.

The modules of a fused linear (query, key and value, or gate and up) get the same A, and each its
rows of B.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import Adapters, adapted_weights, distinct_suffixes
from aligner.checkpoint.canonical import LORA_A, LORA_B, REWARD_HEAD
from aligner.checkpoint.hf.any_model import empty_model
from aligner.checkpoint.hf.families import config_to_hf
from aligner.checkpoint.hf.model_folder import new_folder
from aligner.checkpoint.hf.tensors import LLAMA_TABLE, SCORE, part_rows
from aligner.errors import CheckpointError

_PREFIX = "base_model.model."


def save_peft(
    folder: str | os.PathLike[str],
    adapters: Adapters,
    architecture: GPTArchitecture,
    base_model: str | None = None,
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, both files or none.

    ``folder``: path of a new or an empty directory. ``architecture``: architecture of the base
    model. ``base_model``: its name or path, for ``adapter_config.json``. Raises `CheckpointError`
    if the adapters include a reward head that PEFT cannot represent.
    """
    has_table, has_head = architecture.has_table, REWARD_HEAD[0] in adapters.tensors
    # Only models with Llama's tensor names have a classifier in transformers with such a head.
    if has_head and not (has_table and config_to_hf(architecture)[0].table is LLAMA_TABLE):
        raise CheckpointError(
            f"the adapters include a reward head (rm_head), which a Hugging Face "
            f"{architecture.family} cannot represent. Merge them with `aligner merge-lora`"
        )
    if has_table:
        state, target_settings = _table_state(adapters, architecture, has_head)
    else:
        state, target_settings = _any_state(adapters, architecture)
    config = {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if has_head else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapters.lora.adapter_dim,
        "lora_alpha": adapters.lora.alpha,
        "lora_dropout": adapters.lora.adapter_dropout,
        "modules_to_save": ["score"] if has_head else None,
        "bias": "none",
        "inference_mode": True,
        **target_settings,
    }
    with new_folder(Path(folder)) as partial:
        save_file(state, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _any_state(
    adapters: Adapters, architecture: GPTArchitecture
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return PEFT's tensors and settings for a model that only transformers can build.

    PEFT wraps a module of experts once for each adapted parameter, the last parameter outermost.
    PEFT's A of experts is [experts * rank, in], and its B is [out, rank * experts].
    """
    weights = adapted_weights(empty_model(architecture), adapters.lora)
    experts = [weight.name for weight in weights if weight.is_of_experts]
    inner = Counter(name.rpartition(".")[0] for name in experts)
    state: dict[str, Tensor] = {}
    for weight in weights:
        module = weight.name
        a, b = (adapters.tensors[f"{weight.adapter}.{leaf}"] for leaf in "ab")
        if weight.is_of_experts:
            module = module.rpartition(".")[0]
            inner[module] -= 1
            module += ".base_layer" * inner[module]
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        state[f"{_PREFIX}{module}.lora_A.weight"] = a.contiguous()
        state[f"{_PREFIX}{module}.lora_B.weight"] = b.contiguous()
    linears = [weight for weight in weights if not weight.is_of_experts]
    return state, {
        "target_modules": [weight.name for weight in linears],
        "target_parameters": experts or None,
        "fan_in_fan_out": any(weight.is_transposed for weight in linears),
    }


def _table_state(
    adapters: Adapters, architecture: GPTArchitecture, has_head: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    family, _ = config_to_hf(architecture)
    # A and B of every linear of Hugging Face's model.
    linears = {
        module: (a, rows)
        for name, a in adapters.tensors.items()
        if (linear := name.removesuffix(LORA_A)) != name
        for module, rows in part_rows(
            linear, adapters.tensors[f"{linear}{LORA_B}"], family.table, architecture
        ).items()
    }
    state: dict[str, Tensor] = {}
    for module, (a, b) in linears.items():
        state[f"{_PREFIX}{module}.lora_A.weight"] = a.clone()  # shared tensors cannot be written
        state[f"{_PREFIX}{module}.lora_B.weight"] = b.clone().contiguous()
    if has_head:
        state |= {f"{_PREFIX}{SCORE[name]}": adapters.tensors[name] for name in REWARD_HEAD}
    sources = (name for _, names in family.table.values() for name in names)
    return state, {
        "target_modules": distinct_suffixes(linears, sources),
        "fan_in_fan_out": family.model_type == "gpt2",  # its weights are stored transposed
    }
