"""Reward models on any backend: a head scores a sequence at its last token."""

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligner.checkpoint.canonical import REWARD_HEAD
from aligner.checkpoint.model_source import ModelSource
from aligner.errors import CheckpointError
from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.role.model import ValueModel
from aligner.models.gpt.role.settings import RoleSettings

_STANDARDIZATION = "reward_standardization"
_SEQUENCES = "reward_sequences"


@dataclass(frozen=True)
class SequenceForm:
    """First and last token of training sequences. Scores of other sequences are unreliable."""

    add_bos: bool  # sequences begin with the BOS token
    end_id: int | None  # token at which sequences are scored, or None if it varies

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "SequenceForm | None":
        """Read ``model_config.yaml``. None if the key is missing, `CheckpointError` if invalid."""
        match section := config.get(_SEQUENCES):
            case None:
                return None
            case {"add_bos": bool(add_bos), "end_id": int() | None as end_id}:
                return cls(add_bos, end_id)
        raise CheckpointError(
            f"{_SEQUENCES} of model_config.yaml is {section!r}. Set its key add_bos to true or "
            "false, and its key end_id to a token id or null"
        )


class RewardModelType(enum.Enum):
    """NeMo-Aligner's kinds of reward models, both implemented by `MegatronGPTRewardModel`."""

    BINARY_RANKING = "binary_ranking"  # trained on comparisons
    REGRESSION = "regression"  # trained on ratings of attributes


@dataclass(frozen=True)
class Standardization:
    """Maps rewards to ``(reward - mean) / std``. A fixed data set determines both numbers."""

    mean: float
    std: float

    @classmethod
    def measure(cls, rewards: Tensor) -> "Standardization":
        """Compute mean and unbiased standard deviation of ``rewards``, float ``[N]``."""
        if rewards.numel() < 2 or not rewards.std() > 0:
            raise CheckpointError(
                f"{rewards.numel()} rewards without any spread cannot be standardised. Set "
                "trainer.reward_model.standardize_on=null, or train for longer"
            )
        double = rewards.double()
        return cls(double.mean().item(), double.std().item())

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Standardization | None":
        """Read ``model_config.yaml``. None if off or missing, `CheckpointError` if invalid."""
        section = config.get(_STANDARDIZATION) or {}
        if not section.get("enable"):
            return None
        match section:
            case {"mean": int() | float() as mean, "std": int() | float() as std} if (
                math.isfinite(mean) and 0 < std < math.inf
            ):
                return cls(float(mean), float(std))
        raise CheckpointError(
            f"{_STANDARDIZATION} of model_config.yaml has mean={section.get('mean')!r} and "
            f"std={section.get('std')!r}. Set both to finite numbers, and std above 0"
        )

    def __call__(self, rewards: Tensor) -> Tensor:
        """Standardise rewards, float [...], elementwise."""
        return (rewards - self.mean) / self.std


class RewardRole(ValueModel):
    """Reward model. The head's output at a token scores the text that ends with this token.

    A model trained on comparisons has one output per token. A model trained on ratings has one
    output for each of ``settings.attributes``.
    """

    role_name = "reward model"
    right_shift = False
    standardization: Standardization | None = None  # applied by `infer`, never in training
    sequence_form: SequenceForm | None = None  # None if unknown

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the rated attributes, empty for a model trained on comparisons."""
        return self.settings.attributes or ()

    @property
    def head_outputs(self) -> int:
        """Number of outputs that the head computes for each token."""
        return max(1, len(self.attributes))

    def infer(
        self,
        batch: Mapping[str, Tensor],
        micro_batches: MicroBatches | None = None,
        *,
        standardize: bool = True,
    ) -> Tensor:
        """Compute the reward of each sequence, the head's output at the last valid token.

        ``batch``: ``input_ids`` int64 ``[B, S]`` and ``input_lengths`` int64 ``[B]``.
        ``standardize``: apply the standardisation saved with the model, if any. Returns float32
        ``[B]``, or ``[B, K]`` for K rated attributes.
        """
        scores = self.infer_tokens(batch, micro_batches)
        rows = torch.arange(scores.shape[0], device=scores.device)
        rewards = scores[rows, batch["input_lengths"].long() - 1]
        if standardize and self.standardization is not None:
            return self.standardization(rewards)
        return rewards

    def standardize(self, mean: float, std: float) -> None:
        """Set the standardisation ``(reward - mean) / std``, which is saved with the model."""
        self.standardization = Standardization(mean, std)

    def remember_sequences(self, add_bos: bool, end_id: int | None) -> None:
        """Record in `sequence_form` how training sequences begin and end, for later scoring.

        Sets the head's bias to 0 if the model was trained on comparisons, because these do not
        depend on the bias.
        """
        self.sequence_form = SequenceForm(add_bos, end_id)
        for name, parameter in () if self.attributes else self.model.named_parameters():
            if name.endswith(("rm_head.bias", "score.bias")):
                parameter.data.zero_()

    def infer_rm_critic(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``rewards``, float32 ``[B]``. ``batch``: see `infer`."""
        return {"rewards": self.infer(batch)}

    # NeMo's keys ------------------------------------------------------------------------------

    @classmethod
    def settings_for(cls, checkpoint: ModelSource, settings: RoleSettings) -> RoleSettings:
        """Return ``settings``. The checkpoint's attributes replace attributes of None."""
        if settings.attributes is not None:
            return settings
        return dataclasses.replace(settings, attributes=saved_attributes(checkpoint) or ())

    def read_config(self, config: Mapping[str, Any]) -> None:
        """Read the standardisation and the form of sequences from a ``model_config.yaml``."""
        self.standardization = Standardization.of_config(config)
        self.sequence_form = SequenceForm.of_config(config)

    def nemo_keys(self) -> dict[str, Any]:
        """Return NeMo-Aligner's keys of a reward model, with the attributes' names added."""
        standardization = self.standardization or Standardization(mean=0.0, std=1.0)
        kind = RewardModelType.REGRESSION if self.attributes else RewardModelType.BINARY_RANKING
        keys: dict[str, Any] = {
            "reward_model_type": kind.value,
            _STANDARDIZATION: {
                "enable": self.standardization is not None,
                **dataclasses.asdict(standardization),
            },
        }
        if self.sequence_form is not None:
            keys[_SEQUENCES] = dataclasses.asdict(self.sequence_form)
        if self.attributes:
            names = list(self.attributes)
            keys["regression"] = {"num_attributes": len(names), "attributes": names}
        return keys


def saved_attributes(checkpoint: ModelSource) -> tuple[str, ...] | None:
    """Return names of the attributes that a checkpoint's head rates, None without a head.

    The tuple is empty for a head trained on comparisons. The head's shape sets the number of
    attributes. Their names are in the checkpoint's configuration, or ``attribute_0`` and so on.
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
