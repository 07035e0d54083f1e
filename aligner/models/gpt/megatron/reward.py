"""Reward models: a GPT body whose head scores a whole sequence at its last token.

One may stand on the critic's backbone, which is on the device once; weights are swapped in it:

scoring   critic's weights to the host, reward model's in ─► rewards ─► and back
else      reward model's weights in host memory; the backbone is the critic's
"""

import contextlib
import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping
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
    """Form of the sequences in training, begin and end: scores of other sequences mean little."""

    add_bos: bool
    end_id: int | None  # the token that the score stands at; None: not always the same one

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "SequenceForm | None":
        """Read the form from a ``model_config.yaml``; None where it has none.

        Raises:
            CheckpointError: the values cannot be used.
        """
        found = config.get(_SEQUENCES)
        if found is None:
            return None
        add_bos = found.get("add_bos") if isinstance(found, Mapping) else None
        end_id = found.get("end_id") if isinstance(found, Mapping) else None
        if not isinstance(add_bos, bool) or not isinstance(end_id, int | None):
            raise CheckpointError(
                f"{_SEQUENCES} of model_config.yaml is {found!r}; it must have add_bos, true or "
                "false, and end_id, a token id or null"
            )
        return cls(add_bos, end_id)


class RewardModelType(enum.Enum):
    """NeMo-Aligner's kinds of reward models; one class is both."""

    BINARY_RANKING = "binary_ranking"  # trained on comparisons
    REGRESSION = "regression"  # trained on ratings of attributes


@dataclass(frozen=True)
class Standardization:
    """``(reward - mean) / std``, of rewards that were measured on known data."""

    mean: float
    std: float

    @classmethod
    def measure(cls, rewards: Tensor) -> "Standardization":
        """Mean and unbiased standard deviation of float ``[N]``."""
        if rewards.numel() < 2 or not rewards.std() > 0:
            raise CheckpointError(
                f"{rewards.numel()} rewards without any spread cannot be standardised; set "
                "trainer.reward_model.standardize_on=null, or train for longer"
            )
        double = rewards.double()
        return cls(double.mean().item(), double.std().item())

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Standardization | None":
        """Read mean and deviation from a ``model_config.yaml``; None where it is off or missing.

        Raises:
            CheckpointError: the numbers cannot be used.
        """
        found = config.get(_STANDARDIZATION) or {}
        if not found.get("enable"):
            return None
        mean, std = found.get("mean"), found.get("std")
        numbers = [value for value in (mean, std) if isinstance(value, int | float)]
        if len(numbers) < 2 or not all(map(math.isfinite, numbers)) or numbers[1] <= 0:
            raise CheckpointError(
                f"{_STANDARDIZATION} of model_config.yaml has mean={mean!r} and std={std!r}; both "
                "must be finite numbers and std above 0"
            )
        return cls(float(numbers[0]), float(numbers[1]))

    def __call__(self, rewards: Tensor) -> Tensor:
        """Standardised rewards of float [...], in the same shape."""
        return (rewards - self.mean) / self.std


class MegatronGPTRewardModel(MegatronGPTCriticModel):
    """Scores sequences; the head's output is not shifted, it speaks of the token just read.

    Trained on comparisons its head has one output. Trained on ratings it has one for each attribute
    in ``settings.attributes``.
    """

    role_name = "reward model"
    config_types = (TrainedModelConfig, ModelConfig, RSModelConfig, CriticConfig)
    right_shift = False
    standardization: Standardization | None = None  # applied by `infer`, never in training
    sequence_form: SequenceForm | None = None  # None: nobody said

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of what it rates; none where it was trained on comparisons."""
        return self.settings.attributes or ()

    @property
    def head_outputs(self) -> int:
        """Number of the head's outputs for a token."""
        return max(1, len(self.attributes))

    @property
    def output_shape(self) -> tuple[int, ...]:
        """``(K,)`` where there are several."""
        return () if self.head_outputs == 1 else (self.head_outputs,)

    def infer(
        self,
        batch: Mapping[str, Tensor],
        micro_batches: MicroBatches | None = None,
        *,
        standardize: bool = True,
    ) -> Tensor:
        """Reward of each sequence: the head's output at the last valid token.

        Args:
            batch: ``input_ids`` int64 ``[B, S]`` and ``input_lengths`` int64 ``[B]``.
            micro_batches: sequences per forward pass, or the rows of each; default
                ``forward_micro_batch_size``.
            standardize: apply the standardisation that the model was saved with, if any.

        Returns:
            float32 ``[B]``, or ``[B, K]`` where K attributes are rated.
        """
        scores = self.infer_tokens(batch, micro_batches)
        rows = torch.arange(scores.shape[0], device=scores.device)
        rewards = scores[rows, batch["input_lengths"].long() - 1]
        if standardize and self.standardization is not None:
            return self.standardization(rewards)
        return rewards

    def standardize(self, mean: float, std: float) -> None:
        """Apply ``(reward - mean) / std`` from now on, and save it with the model."""
        self.standardization = Standardization(mean, std)

    def remember_sequences(self, add_bos: bool, end_id: int | None) -> None:
        """Save with the model the form of its training's sequences (`SequenceForm`)."""
        self.sequence_form = SequenceForm(add_bos, end_id)

    def infer_rm_critic(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rewards float32 ``[B]`` under the key ``rewards``; ``batch`` as in `infer`."""
        return {"rewards": self.infer(batch)}

    # NeMo's keys ------------------------------------------------------------------------------

    @classmethod
    def settings_for(cls, checkpoint: ModelSource, settings: RoleSettings) -> RoleSettings:
        """Without ``attributes`` the model has the head that the file brings."""
        if settings.attributes is not None:
            return settings
        return dataclasses.replace(settings, attributes=saved_attributes(checkpoint) or ())

    def read_config(self, config: Mapping[str, Any]) -> None:
        """See `MegatronGPTModel.read_config`."""
        self.standardization = Standardization.of_config(config)
        self.sequence_form = SequenceForm.of_config(config)

    def nemo_keys(self) -> dict[str, Any]:
        """NeMo-Aligner's keys of a reward model, and the attributes' names beside their number."""
        known = self.standardization
        kind = RewardModelType.REGRESSION if self.attributes else RewardModelType.BINARY_RANKING
        keys: dict[str, Any] = {
            "reward_model_type": kind.value,
            _STANDARDIZATION: {
                "enable": known is not None,
                "mean": 0.0 if known is None else known.mean,
                "std": 1.0 if known is None else known.std,
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
    """Attributes that a `.nemo`'s head rates; none: it was trained on comparisons.

    None where the file has no head. The head's shape is the truth; the configuration names them.
    """
    if REWARD_HEAD[0] not in checkpoint.weights:
        return None
    outputs = checkpoint.weights[REWARD_HEAD[0]].shape[0]
    named = (checkpoint.config.get("regression") or {}).get("attributes") or []
    kind = checkpoint.config.get("reward_model_type")
    if kind != RewardModelType.REGRESSION.value and outputs == 1:
        return ()
    if len(named) == outputs:
        return tuple(map(str, named))
    return tuple(f"attribute_{number}" for number in range(outputs))


def rated_attributes(checkpoint: ModelSource, path: str) -> tuple[str, ...]:
    """`saved_attributes` of a reward model; `CheckpointError` where ``path`` is none."""
    attributes = saved_attributes(checkpoint)
    if attributes is None:
        raise CheckpointError(
            f"{path} has no reward head (rm_head), so it is no reward model; train one with "
            "examples/train_gpt_reward.py"
        )
    return attributes


class SharedBackboneRewardModel(MegatronGPTRewardModel):
    """Scores with its own weights on a backbone that is a critic's otherwise; it never learns.

    The two must have one architecture (`body_differences`). The head, a few numbers, is its own.
    """

    def __init__(self, *args: Any, backbone: GPTModel, **kwargs: Any) -> None:
        """``backbone``: the critic's; arguments as in `MegatronGPTRewardModel`."""
        self.__dict__["_backbone"] = backbone  # not registered: no module yet
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
        """Load a reward model through ``critic``'s backbone, whose weights are back afterwards."""
        backbone = critic.gpt
        critics_head = getattr(backbone, "rm_head", None)
        critics = SwappedWeights(_without_head(backbone))
        try:
            model = cls.from_checkpoint(
                checkpoint, settings=settings, tokenizer=tokenizer, backbone=backbone
            )
            model._head = getattr(backbone, "rm_head", None)
            model._weights = SwappedWeights(_without_head(backbone))
        finally:
            critics.exchange()
            _put_head(backbone, critics_head)
        critic.rewards_of = model.infer
        return model

    def build_gpt(self, initialize: bool) -> GPTModel:
        """The critic's backbone with a head of this model's own."""
        assert not initialize  # the weights come out of a file
        self.add_head(self._backbone)
        return self._backbone

    def infer_tokens(
        self,
        batch: Mapping[str, Tensor],
        micro_batches: MicroBatches | None = None,
        model: GPTModel | None = None,
    ) -> Tensor:
        """See `RoleModel.infer_tokens`; meanwhile the backbone holds this model's weights."""
        with self._swapped_in():
            return super().infer_tokens(batch, micro_batches, model)

    @contextlib.contextmanager
    def _swapped_in(self) -> Iterator[None]:
        critics_head = getattr(self._backbone, "rm_head", None)
        with self._weights.in_place(), adapters_off(self._backbone):  # adapters are the critic's
            _put_head(self._backbone, self._head)
            try:
                yield
            finally:
                _put_head(self._backbone, critics_head)


def _without_head(gpt: GPTModel) -> dict[str, Tensor]:
    return {name: value for name, value in gpt.named_parameters() if "rm_head." not in name}


def _put_head(gpt: GPTModel, head: Any) -> None:
    """Stages before the last have none."""
    if head is not None:
        gpt.rm_head = head
