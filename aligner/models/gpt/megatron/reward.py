"""Reward models: a GPT body with a head that scores a sequence at its last token.

A reward model can share the critic's backbone on the device. Only while it scores, its weights are
in the backbone:

scoring    critic's weights to the host, reward model's to the device ─► rewards ─► back
otherwise  reward model's weights in host memory, critic's on the device
"""

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.checkpoint.canonical import REWARD_HEAD
from aligner.checkpoint.model_source import ModelSource
from aligner.config import CriticConfig, ModelConfig, RSModelConfig, TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import CheckpointError
from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.lora import adapters_off
from aligner.models.gpt.megatron.critic import MegatronGPTCriticModel
from aligner.models.gpt.role.offload import SwappedWeights
from aligner.models.gpt.role.settings import RoleSettings

_STANDARDIZATION = "reward_standardization"
_SEQUENCES = "reward_sequences"


@dataclass(frozen=True)
class SequenceForm:
    """First and last token of training sequences. Scores of other sequences are unreliable."""

    add_bos: bool
    end_id: int | None  # token at which sequences are scored, or None if it varies

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "SequenceForm | None":
        """Read the form from a ``model_config.yaml``, or return None if the key is missing.

        Raises:
            CheckpointError: the values are invalid.
        """
        section = config.get(_SEQUENCES)
        if section is None:
            return None
        add_bos = section.get("add_bos") if isinstance(section, Mapping) else None
        end_id = section.get("end_id") if isinstance(section, Mapping) else None
        if not isinstance(add_bos, bool) or not isinstance(end_id, int | None):
            raise CheckpointError(
                f"{_SEQUENCES} of model_config.yaml is {section!r}. It must contain add_bos, true "
                "or false, and end_id, a token id or null"
            )
        return cls(add_bos, end_id)


class RewardModelType(enum.Enum):
    """NeMo-Aligner's kinds of reward models, both implemented by `MegatronGPTRewardModel`."""

    BINARY_RANKING = "binary_ranking"  # trained on comparisons
    REGRESSION = "regression"  # trained on ratings of attributes


@dataclass(frozen=True)
class Standardization:
    """``(reward - mean) / std``, with statistics of rewards on a fixed data set."""

    mean: float
    std: float

    @classmethod
    def measure(cls, rewards: Tensor) -> "Standardization":
        """Compute mean and unbiased standard deviation of float ``[N]``."""
        if rewards.numel() < 2 or not rewards.std() > 0:
            raise CheckpointError(
                f"{rewards.numel()} rewards without any spread cannot be standardised. Set "
                "trainer.reward_model.standardize_on=null, or train for longer"
            )
        double = rewards.double()
        return cls(double.mean().item(), double.std().item())

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Standardization | None":
        """Read mean and deviation from a ``model_config.yaml``, or return None if off or missing.

        Raises:
            CheckpointError: the values are invalid.
        """
        section = config.get(_STANDARDIZATION) or {}
        if not section.get("enable"):
            return None
        mean, std = section.get("mean"), section.get("std")
        values = [value for value in (mean, std) if isinstance(value, int | float)]
        if len(values) < 2 or not all(map(math.isfinite, values)) or values[1] <= 0:
            raise CheckpointError(
                f"{_STANDARDIZATION} of model_config.yaml contains mean={mean!r} and std={std!r}. "
                "Both must be finite numbers and std above 0"
            )
        return cls(float(values[0]), float(values[1]))

    def __call__(self, rewards: Tensor) -> Tensor:
        """Standardise rewards, float [...], elementwise."""
        return (rewards - self.mean) / self.std


class MegatronGPTRewardModel(MegatronGPTCriticModel):
    """Model that scores sequences. The output at a token scores the text up to that token.

    A model trained on comparisons has one output. A model trained on ratings has one output for
    each attribute in ``settings.attributes``.
    """

    role_name = "reward model"
    config_types = (TrainedModelConfig, ModelConfig, RSModelConfig, CriticConfig)
    right_shift = False
    standardization: Standardization | None = None  # applied by `infer`, never in training
    sequence_form: SequenceForm | None = None  # None if unknown

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the rated attributes, empty for a model trained on comparisons."""
        return self.settings.attributes or ()

    @property
    def head_outputs(self) -> int:
        """Number of the head's outputs for a token."""
        return max(1, len(self.attributes))

    @property
    def output_shape(self) -> tuple[int, ...]:
        """``(K,)`` for K > 1 outputs, else ``()``."""
        return () if self.head_outputs == 1 else (self.head_outputs,)

    def infer(
        self,
        batch: Mapping[str, Tensor],
        micro_batches: MicroBatches | None = None,
        *,
        standardize: bool = True,
    ) -> Tensor:
        """Compute the reward of each sequence, the head's output at the last valid token.

        ``batch``: ``input_ids`` int64 ``[B, S]`` and ``input_lengths`` int64 ``[B]``.
        ``micro_batches``: see `RoleModel.infer_tokens`. ``standardize``: apply the standardisation
        saved with the model, if any. Returns float32 ``[B]``, or ``[B, K]`` for K rated attributes.
        """
        scores = self.infer_tokens(batch, micro_batches)
        rows = torch.arange(scores.shape[0], device=scores.device)
        rewards = scores[rows, batch["input_lengths"].long() - 1]
        if standardize and self.standardization is not None:
            return self.standardization(rewards)
        return rewards

    def standardize(self, mean: float, std: float) -> None:
        """Apply ``(reward - mean) / std`` from now on. Both numbers are saved with the model."""
        self.standardization = Standardization(mean, std)

    def remember_sequences(self, add_bos: bool, end_id: int | None) -> None:
        """Set the form of training sequences, which is saved with the model."""
        self.sequence_form = SequenceForm(add_bos, end_id)

    def infer_rm_critic(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``rewards``, float32 ``[B]``. ``batch``: see `infer`."""
        return {"rewards": self.infer(batch)}

    # NeMo's keys ------------------------------------------------------------------------------

    @classmethod
    def settings_for(cls, checkpoint: ModelSource, settings: RoleSettings) -> RoleSettings:
        """Return ``settings``, with the file's attributes if ``settings.attributes`` is None."""
        if settings.attributes is not None:
            return settings
        return dataclasses.replace(settings, attributes=saved_attributes(checkpoint) or ())

    def read_config(self, config: Mapping[str, Any]) -> None:
        """See `MegatronGPTModel.read_config`."""
        self.standardization = Standardization.of_config(config)
        self.sequence_form = SequenceForm.of_config(config)

    def nemo_keys(self) -> dict[str, Any]:
        """Return NeMo-Aligner's keys of a reward model, with the attributes' names added."""
        standardization = self.standardization
        kind = RewardModelType.REGRESSION if self.attributes else RewardModelType.BINARY_RANKING
        keys: dict[str, Any] = {
            "reward_model_type": kind.value,
            _STANDARDIZATION: {
                "enable": standardization is not None,
                "mean": 0.0 if standardization is None else standardization.mean,
                "std": 1.0 if standardization is None else standardization.std,
            },
        }
        if self.sequence_form is not None:
            keys[_SEQUENCES] = dataclasses.asdict(self.sequence_form)
        if self.attributes:
            keys["regression"] = {
                "num_attributes": len(self.attributes),
                "attributes": list(self.attributes),
            }
        return keys


REWARD_MODEL_CLASS_DICT = dict.fromkeys(RewardModelType, MegatronGPTRewardModel)


def saved_attributes(checkpoint: ModelSource) -> tuple[str, ...] | None:
    """Return the attributes that a saved head rates, empty for a head trained on comparisons.

    The head's shape determines their count and the configuration their names. Return None if the
    file contains no head.
    """
    if REWARD_HEAD[0] not in checkpoint.weights:
        return None
    # A head with one output is of a regression model only if the configuration says so.
    outputs = checkpoint.weights[REWARD_HEAD[0]].shape[0]
    named = (checkpoint.config.get("regression") or {}).get("attributes") or []
    kind = checkpoint.config.get("reward_model_type")
    if kind != RewardModelType.REGRESSION.value and outputs == 1:
        return ()
    if len(named) == outputs:
        return tuple(map(str, named))
    return tuple(f"attribute_{index}" for index in range(outputs))


def rated_attributes(checkpoint: ModelSource, path: str) -> tuple[str, ...]:
    """Return `saved_attributes`, or raise `CheckpointError` if ``path`` is not a reward model."""
    attributes = saved_attributes(checkpoint)
    if attributes is None:
        raise CheckpointError(
            f"{path} is not a reward model: it contains no reward head (rm_head). Train a reward "
            "model with examples/train_gpt_reward.py"
        )
    return attributes


class SharedBackboneRewardModel(MegatronGPTRewardModel):
    """Frozen reward model that shares a critic's backbone and swaps its weights in to score.

    Both models must have the same architecture (`body_differences`). The heads are separate.
    """

    def __init__(self, *args: Any, backbone: GPTModel, **kwargs: Any) -> None:
        """``backbone``: the critic's model. For the other arguments see the base class."""
        self.__dict__["_backbone"] = backbone  # nn.Module.__init__ has not run yet
        super().__init__(*args, **kwargs)

    @classmethod
    def in_critic(
        cls,
        critic: MegatronGPTCriticModel,
        checkpoint: ModelSource,
        *,
        settings: RoleSettings,
        tokenizer: Tokenizer,
    ) -> Self:
        """Load a reward model through ``critic``'s backbone, then restore the critic's weights."""
        # The critic's weights wait in host memory while the reward model is loaded.
        backbone = critic.gpt
        critic_head = getattr(backbone, "rm_head", None)
        critic_weights = SwappedWeights(_without_head(backbone))
        try:
            model = cls.from_checkpoint(
                checkpoint, settings=settings, tokenizer=tokenizer, backbone=backbone
            )
            model._head = getattr(backbone, "rm_head", None)
            model._weights = SwappedWeights(_without_head(backbone))
        finally:
            critic_weights.exchange()
            _set_head(backbone, critic_head)
        critic.rewards_of = model.infer
        return model

    def build_gpt(self, initialize: bool) -> GPTModel:
        """Return the critic's backbone, with a new head."""
        assert not initialize  # the weights are loaded from a file
        self.add_head(self._backbone)
        return self._backbone

    def infer_tokens(
        self,
        batch: Mapping[str, Tensor],
        micro_batches: MicroBatches | None = None,
        model: GPTModel | None = None,
    ) -> Tensor:
        """See `RoleModel.infer_tokens`. This model's weights are swapped in meanwhile."""
        critic_head = getattr(self._backbone, "rm_head", None)
        with self._weights.in_place(), adapters_off(self._backbone):  # adapters are the critic's
            _set_head(self._backbone, self._head)
            try:
                return super().infer_tokens(batch, micro_batches, model)
            finally:
                _set_head(self._backbone, critic_head)


def _without_head(gpt: GPTModel) -> dict[str, Tensor]:
    return {name: value for name, value in gpt.named_parameters() if "rm_head." not in name}


def _set_head(gpt: GPTModel, head: Any) -> None:
    if head is not None:  # None before the last pipeline stage
        gpt.rm_head = head
