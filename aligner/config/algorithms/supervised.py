"""Worked examples, and loops over them: fine-tuning and distillation."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import StrictBool, StrictStr

from aligner.config.algorithms.process import TrainingConfig
from aligner.config.algorithms.trainer import SupervisedLoopConfig
from aligner.config.data import SEPARATE_RESPONSE, PromptColumns, TrainingSets
from aligner.config.fields import Count, Fraction, ModelPath
from aligner.config.roles.model import TrainedModelConfig
from aligner.config.roles.sampling import LengthParams, RolloutConfig, SamplingParams


@dataclass(frozen=True)
class ExampleDataConfig(PromptColumns, TrainingSets):
    """Training and validation examples, and how a row becomes one."""

    response_column: Annotated[StrictStr, SEPARATE_RESPONSE] = "response"
    """Column of text, of the assistant's message, or of a whole chat."""

    messages_column: StrictStr | None = None
    """Column of a whole chat that the assistant ends, instead of these two. `null` means none."""

    learn: Literal["last", "all"] = "all"
    """Assistant messages of a chat that are learned: `all` or `last`."""

    max_length: Count | None = None
    """Tokens of an example; longer ones are dropped and counted. `null` means none are.

    Never cut.
    """


@dataclass(frozen=True)
class SFTTrainerConfig(TrainingConfig):
    """The trainer of a supervised run."""

    sft: SupervisedLoopConfig = field(default_factory=SupervisedLoopConfig)


KLDirection = Literal["forward", "backward", "mixed"]


@dataclass(frozen=True)
class StudentSamplingConfig:
    """Sampling of the student, where it learns from its own responses."""

    rollout_micro_batch_size: Count = 64
    """On-policy: sequences in flight together while sampling, per rank."""

    length_params: LengthParams = field(default_factory=LengthParams)
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling of the responses; the temperature is also that of the compared distributions."""


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

    restore_from_path: ModelPath
    """A `.nemo` file whose tokenizer is the student's."""

    micro_batch_size: Count = 8
    """Sequences per forward pass of the teacher, per data-parallel rank."""


@dataclass(frozen=True)
class TrainerDistillConfig(SupervisedLoopConfig):
    """The loop; a step is one optimizer update on one global batch."""

    on_policy: StrictBool = False
    """Learn on the student's own responses to the prompts, anew each step, not on the data's."""

    kl: KLDirection = "forward"
    """Divergence of teacher and student.

    `forward` (teacher to student), `backward` (student to teacher) or `mixed`.
    """

    mixed_weight: Fraction = 0.5
    """`mixed`: weight of the forward divergence; the backward one has the rest."""

    top_k: Count = 64
    """The teacher's likeliest tokens at each position, which the loss reads."""

    zero_outside_topk: StrictBool = True
    """The teacher gives other tokens probability 0. `false` means they are not looked at."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse models and options that distillation does not have."""
        if run.policy.backend != "megatron":
            yield (
                f"policy.backend={run.policy.backend}: student and teacher are megatron-core "
                "models. Set policy.backend=megatron"
            )
        default = TrainerDistillConfig.mixed_weight
        if self.kl != "mixed" and self.mixed_weight != default:
            yield (
                f"{key}.mixed_weight={self.mixed_weight} weighs the two divergences of kl=mixed, "
                f"and {key}.kl={self.kl}. Leave it at {default}, or set kl=mixed"
            )
        if self.on_policy and run.data.messages_column is not None:
            yield (
                f"data.messages_column={run.data.messages_column} is a chat with its answers, and "
                f"{key}.on_policy=true reads prompts alone. Name data.prompt_column instead"
            )


@dataclass(frozen=True)
class DistillTrainerConfig(TrainingConfig):
    """The trainer of a distillation run."""

    distill: TrainerDistillConfig = field(default_factory=TrainerDistillConfig)
