"""Export of adapters in the format of Hugging Face's PEFT, for ``PeftModel.from_pretrained``.

The fused linears of this library are separate in Hugging Face's models: query, key and value (gate
and up) share A, and each receives its rows of B.
"""

import json
import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import Adapters, distinct_suffixes
from aligner.checkpoint.canonical import LORA_A, LORA_B, REWARD_HEAD
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
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, completely or not at all.

    Args:
        folder: path of a new or an empty directory.
        adapters: result of `read_adapters`.
        architecture: shape of the base model.
        base_model: name or path of the base model in Hugging Face's format, for the configuration.
    """
    family, _ = config_to_hf(architecture)
    has_head = REWARD_HEAD[0] in adapters.tensors
    if has_head and family.table is not LLAMA_TABLE:
        raise CheckpointError(
            f"the adapters include a reward head (rm_head), which a Hugging Face "
            f"{family.model_type} cannot represent. Merge them into a .nemo"
        )
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
    config = {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if has_head else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapters.lora.adapter_dim,
        "lora_alpha": adapters.lora.alpha,
        "lora_dropout": adapters.lora.adapter_dropout,
        "target_modules": distinct_suffixes(
            linears, (name for _, sources in family.table.values() for name in sources)
        ),
        "modules_to_save": ["score"] if has_head else None,
        "fan_in_fan_out": family.model_type == "gpt2",  # its weights are stored transposed
        "bias": "none",
        "inference_mode": True,
    }
    with new_folder(Path(folder)) as partial:
        save_file(state, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
