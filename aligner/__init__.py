"""Align language models with reinforcement learning on megatron-core GPT models."""

import importlib
from typing import TYPE_CHECKING, Any

from aligner.api.quiet import quiet
from aligner.compat import paths

if TYPE_CHECKING:
    from aligner.api.model import CriticModel, Model, load_critic, load_model
    from aligner.api.result import Result
    from aligner.api.train import (
        train_distill,
        train_dpo,
        train_grpo,
        train_ppo,
        train_reward,
        train_rs,
        train_sft,
    )

__version__ = "0.2.0"
__all__ = [
    "CriticModel",
    "Model",
    "Result",
    "load_critic",
    "load_model",
    "train_distill",
    "train_dpo",
    "train_grpo",
    "train_ppo",
    "train_reward",
    "train_rs",
    "train_sft",
]
_MODULES = {
    **dict.fromkeys(("CriticModel", "Model", "load_critic", "load_model"), "model"),
    "Result": "result",
}
paths.install()


def __getattr__(name: str) -> Any:
    """Import an object of the Python API at its first use, so that ``import aligner`` is fast."""
    if name in __all__:
        with quiet():
            module = importlib.import_module(f"aligner.api.{_MODULES.get(name, 'train')}")
        return getattr(module, name)
    raise AttributeError(f"module 'aligner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
