"""Data, models and trainer of supervised fine-tuning and of distillation."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import StrictBool, StrictStr

from aligner.config.algorithms.process import TrainingConfig
from aligner.config.algorithms.trainer import SupervisedLoopConfig
from aligner.config.combinations import ReadIf
from aligner.config.data import SEPARATE_RESPONSE, PromptColumns, TrainingSets
from aligner.config.fields import Count, Fraction, ModelPath
from aligner.config.roles.model import TrainedModelConfig
from aligner.config.roles.sampling import LengthParams, RolloutConfig, SamplingParams

WITHOUT_TEXT = ReadIf(
    lambda run: getattr(run.data, "text_column", None) is None,
    "names chats, but data.text_column names plain text",
)


@dataclass(frozen=True)
class ExampleDataConfig(PromptColumns, TrainingSets):
    """Training and validation examples, and the columns of their rows."""

    response_column: Annotated[StrictStr, SEPARATE_RESPONSE] = "response"
    """Column of the response: text, the assistant's message, or a complete chat."""

    messages_column: Annotated[StrictStr | None, WITHOUT_TEXT] = None
    """Column of complete chats, in place of a prompt and a response column. The last message of a
    chat is the assistant's. `null` means no such column."""

    text_column: StrictStr | None = None
    """Column of plain text, in place of all other columns. Every token but the first is learned.
    `null` means no such column."""

    learn: Literal["last", "all"] = "all"
    """Assistant messages of a chat that are learned: `all`, or only the `last`."""

    max_length: Count | None = None
    """Maximum number of tokens in an example. `null` means no limit. Longer examples are dropped,
    never truncated."""


@dataclass(frozen=True)
class SFTTrainerConfig(TrainingConfig):
    """Section ``trainer`` of supervised fine-tuning."""

    sft: SupervisedLoopConfig = field(default_factory=SupervisedLoopConfig)


KLDirection = Literal["forward", "backward", "mixed"]


@dataclass(frozen=True)
class StudentSamplingConfig:
    """Sampling of the student's responses in on-policy distillation."""

    rollout_micro_batch_size: Count = 64
    """On-policy: sequences that are sampled at the same time, per rank."""

    length_params: LengthParams = field(default_factory=LengthParams)
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    """Sampling of responses. The temperature also applies to the compared distributions."""


@dataclass(frozen=True)
class StudentConfig(TrainedModelConfig):
    """The trained model of a distillation."""

    rollout_key: ClassVar[str] = "model.distill"
    distill: StudentSamplingConfig = field(default_factory=StudentSamplingConfig)

    @property
    def rollout(self) -> RolloutConfig:
        """Options of on-policy sampling, with one response per prompt."""
        return RolloutConfig(
            rollout_micro_batch_size=self.distill.rollout_micro_batch_size,
            forward_micro_batch_size=self.micro_batch_size,
            length_params=self.distill.length_params,
            sampling_params=self.distill.sampling_params,
        )


@dataclass(frozen=True)
class TeacherConfig:
    """The frozen teacher. It has the student's parallel layout and limits of micro-batches."""

    restore_from_path: ModelPath
    """A `.nemo` file or Hugging Face directory with the same tokenizer as the student."""

    micro_batch_size: Count = 8
    """Sequences per forward pass of the teacher, per data-parallel rank."""


@dataclass(frozen=True)
class TrainerDistillConfig(SupervisedLoopConfig):
    """Training loop of a distillation. A step is one optimizer update on one global batch."""

    on_policy: StrictBool = False
    """Learn from responses that the student samples in each step, not from the data's responses."""

    kl: KLDirection = "forward"
    """Divergence between teacher and student. `forward` (teacher to student), `backward` (student
    to teacher) or `mixed`."""

    mixed_weight: Fraction = 0.5
    """`mixed`: weight w of the forward divergence. The backward divergence has weight 1 - w."""

    top_k: Count = 64
    """Number of the teacher's most probable tokens at each position that the loss uses."""

    zero_outside_topk: StrictBool = True
    """Assume teacher probability 0 for all other tokens. `false` leaves them out."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield a message if ``mixed_weight`` is unused or on-policy data have responses."""
        default = TrainerDistillConfig.mixed_weight
        if self.kl != "mixed" and self.mixed_weight != default:
            yield (
                f"{key}.mixed_weight={self.mixed_weight} needs kl=mixed, but {key}.kl={self.kl}. "
                f"Set it to {default}, or set kl=mixed"
            )
        if self.on_policy and run.data.messages_column is not None:
            yield (
                f"data.messages_column={run.data.messages_column} contains answers, but "
                f"{key}.on_policy=true reads only prompts. Use data.prompt_column instead"
            )


@dataclass(frozen=True)
class DistillTrainerConfig(TrainingConfig):
    """Section ``trainer`` of distillation."""

    distill: TrainerDistillConfig = field(default_factory=TrainerDistillConfig)
