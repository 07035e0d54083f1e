"""megatron-core GPT models as actor, critic, reward model and reference.

The classes are imported on first use, because megatron-core and NeMo are slow to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aligner.models.gpt.megatron.actor import MegatronGPTActorModel, MegatronGPTRSModel
    from aligner.models.gpt.megatron.critic import MegatronGPTCriticModel
    from aligner.models.gpt.megatron.loading import load_from_nemo
    from aligner.models.gpt.megatron.model import MegatronGPTModel
    from aligner.models.gpt.megatron.reward import (
        REWARD_MODEL_CLASS_DICT,
        MegatronGPTRewardModel,
        RewardModelType,
    )
    from aligner.models.gpt.role.policy import ReferencePolicy

_HOMES = {
    "MegatronGPTActorModel": "megatron.actor",
    "MegatronGPTCriticModel": "megatron.critic",
    "MegatronGPTModel": "megatron.model",
    "MegatronGPTRSModel": "megatron.actor",
    "MegatronGPTRewardModel": "megatron.reward",
    "REWARD_MODEL_CLASS_DICT": "megatron.reward",
    "ReferencePolicy": "role.policy",
    "RewardModelType": "megatron.reward",
    "load_from_nemo": "megatron.loading",
}

__all__ = [
    "MegatronGPTActorModel",
    "MegatronGPTCriticModel",
    "MegatronGPTModel",
    "MegatronGPTRSModel",
    "MegatronGPTRewardModel",
    "REWARD_MODEL_CLASS_DICT",
    "ReferencePolicy",
    "RewardModelType",
    "load_from_nemo",
]
# NeMo-Aligner's names of these classes. Its actors differ in the loss, which is an argument here.
_NEMO_ALIGNER = {
    "GPTKnowledgeDistillationModel": "MegatronGPTActorModel",
    "GPTSFTModel": "MegatronGPTRSModel",
    "MegatronGPTDPOModel": "MegatronGPTActorModel",
    "MegatronGPTKTOModel": "MegatronGPTActorModel",
    "MegatronGPTRegressionRewardModel": "MegatronGPTRewardModel",
    "MegatronGPTReinforceActorModel": "MegatronGPTActorModel",
}
_ABSENT = {
    "GPTSteerLMModel": "train a reward model on ratings (examples/train_gpt_reward.py) and sample "
    "against it (examples/train_gpt_rs.py)",
    "MegatronGPTSPINModel": "use trainer.dpo with pairs of given and own responses "
    "(python -m aligner.examples.tasks.form_pairs)",
}


def __getattr__(name: str) -> Any:
    name = _NEMO_ALIGNER.get(name, name)
    if name not in _HOMES:
        instead = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
