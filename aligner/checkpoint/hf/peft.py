"""Adapters in the format of Hugging Face's PEFT, for ``PeftModel.from_pretrained``.

PEFT knows the linears of Hugging Face's models, where ours are fused: query, key and value (gate
and up) get the same A and each its rows of B.
"""

import json
import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import Adapters
from aligner.checkpoint.canonical import LORA_A, LORA_B, REWARD_HEAD
from aligner.checkpoint.hf.families import config_to_hf
from aligner.checkpoint.hf.model_folder import new_folder
from aligner.checkpoint.hf.tensors import LLAMA_TABLE, SCORE, Table, part_rows
from aligner.errors import CheckpointError

_PREFIX = "base_model.model."


def save_peft(
    folder: str | os.PathLike[str],
    adapters: Adapters,
    architecture: GPTArchitecture,
    base_model: str | None = None,
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``; complete or not at all.

    Args:
        folder: must not exist yet, or be empty.
        adapters: as `read_adapters` gives them.
        architecture: of the model they belong to.
        base_model: name or path of that model as a Hugging Face directory, for the configuration.
    """
    family, _ = config_to_hf(architecture)
    has_head = REWARD_HEAD[0] in adapters.tensors
    if has_head and family.table is not LLAMA_TABLE:
        raise CheckpointError(
            f"the adapters come with a reward head (rm_head), which a Hugging Face "
            f"{family.model_type} cannot carry in our form; merge them into a .nemo"
        )
    linears = {  # A and B of every linear that Hugging Face's model has
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
        "target_modules": _targets(set(linears), family.table),
        "modules_to_save": ["score"] if has_head else None,
        "fan_in_fan_out": family.model_type == "gpt2",  # its weights are stored transposed
        "bias": "none",
        "inference_mode": True,
    }
    with new_folder(Path(folder)) as partial:
        save_file(state, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _targets(modules: set[str], table: Table) -> list[str]:
    """Ends of names that mean these modules and, in this family, no others."""

    def last_two(name: str) -> str:
        return ".".join(name.split(".")[-2:])

    ends = {last_two(module) for module in modules}
    others = {last_two(source) for _, sources in table.values() for source in sources} - ends
    shorter = {end.split(".")[-1] for end in ends}
    strangers = {other for other in others if other.split(".")[-1] in shorter}
    return sorted(ends if strangers else shorter)
