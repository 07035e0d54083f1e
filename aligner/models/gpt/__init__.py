"""megatron-core GPT models as actor, critic, reward model and reference.

The classes are imported on first use: importing them costs what megatron-core and NeMo cost.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aligner.models.gpt.actor import MegatronGPTActorModel
    from aligner.models.gpt.critic import MegatronGPTCriticModel
    from aligner.models.gpt.loading import load_from_nemo
    from aligner.models.gpt.megatron import MegatronGPTModel
    from aligner.models.gpt.reference import ReferencePolicy
    from aligner.models.gpt.reward import MegatronGPTRewardModel
    from aligner.models.gpt.rs_actor import MegatronGPTRSModel

_HOMES = {
    "MegatronGPTActorModel": "actor",
    "MegatronGPTCriticModel": "critic",
    "MegatronGPTModel": "megatron",
    "MegatronGPTRSModel": "rs_actor",
    "MegatronGPTRewardModel": "reward",
    "ReferencePolicy": "reference",
    "load_from_nemo": "loading",
}

__all__ = [
    "MegatronGPTActorModel",
    "MegatronGPTCriticModel",
    "MegatronGPTModel",
    "MegatronGPTRSModel",
    "MegatronGPTRewardModel",
    "ReferencePolicy",
    "load_from_nemo",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
