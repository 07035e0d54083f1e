"""Distillation: a student, its teacher, and the loop."""

from dataclasses import dataclass, field
from typing import Literal

from aligner.config.algorithms.trainer import SupervisedLoopConfig, TrainingConfig
from aligner.config.fields import Count, Fraction, ModelPath
from aligner.config.roles.model import (
    LengthParams,
    RolloutConfig,
    SamplingParams,
    TrainedModelConfig,
)

KLDirection = Literal["forward", "backward", "mixed"]


@dataclass(frozen=True)
class StudentSamplingConfig:
    """Sampling of the student, where it learns from its own responses."""

    rollout_micro_batch_size: Count = 64  # sequences in flight together while generating, per rank
    length_params: LengthParams = field(default_factory=LengthParams)
    # The temperature is also that of the two distributions that are compared.
    sampling_params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class StudentConfig(TrainedModelConfig):
    """The model that learns."""

    distill: StudentSamplingConfig = field(default_factory=StudentSamplingConfig)

    @property
    def rollout_key(self) -> str:
        """Section of its sampling options."""
        return "model.distill"

    @property
    def rollout(self) -> RolloutConfig:
        """Sampling of the rollouts: one response to each prompt."""
        return RolloutConfig(
            rollout_micro_batch_size=self.distill.rollout_micro_batch_size,
            forward_micro_batch_size=self.micro_batch_size,
            length_params=self.distill.length_params,
            sampling_params=self.distill.sampling_params,
        )


@dataclass(frozen=True)
class TeacherConfig:
    """The model that is learned from: frozen, in the student's layout and batching by tokens."""

    restore_from_path: ModelPath  # a .nemo file; its tokenizer is the student's
    micro_batch_size: Count = 8  # sequences per forward pass, per data-parallel rank


@dataclass(frozen=True)
class TrainerDistillConfig(SupervisedLoopConfig):
    """The loop; a step is one optimizer update on one global batch."""

    # false: learn on the responses of the data; true: on responses that the student samples to its
    # prompts, anew in every step.
    on_policy: bool = False
    kl: KLDirection = "forward"  # forward: teacher to student; backward: student to teacher; mixed
    mixed_weight: Fraction = 0.5  # mixed: of the forward divergence; the backward one has the rest
    top_k: Count = 64  # the teacher's likeliest tokens at each position, which the loss reads
    # true: the teacher gives every other token probability 0; false: others are not looked at.
    zero_outside_topk: bool = True


@dataclass(frozen=True)
class DistillTrainerConfig(TrainingConfig):
    """The trainer of a distillation run."""

    distill: TrainerDistillConfig = field(default_factory=TrainerDistillConfig)
