"""Preferences: pairs of responses, or responses that are good or bad; and a loop over them."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from aligner.config.algorithms.trainer import SupervisedLoopConfig, TrainingConfig
from aligner.config.data import PromptSourceConfig
from aligner.config.fields import Count, NonNegative, Positive, Range

PreferenceLossName = Literal["dpo", "ipo", "rpo", "simpo", "kto"]

# The options that each loss has beside beta.
LOSS_OPTIONS: dict[PreferenceLossName, tuple[str, ...]] = {
    "dpo": ("label_smoothing", "average_logprobs", "sft_weight"),
    "ipo": ("average_logprobs", "sft_weight"),
    "rpo": ("distance", "reward_scale", "average_logprobs", "sft_weight"),
    "simpo": ("target_margin", "sft_weight"),
    "kto": ("desirable_weight", "undesirable_weight"),
}


@dataclass(frozen=True)
class PairDataConfig:
    """Training and validation pairs, and how a row becomes one."""

    train: PromptSourceConfig
    validation: PromptSourceConfig | None = None  # null: no validation
    prompt_column: str = "prompt"  # text, or a list of chat messages (role, content)
    chosen_column: str = "chosen"  # the better response: text, a message, or a whole chat
    rejected_column: str = "rejected"  # the worse
    tools_column: str | None = "tools"  # functions that a chat's assistant may call; null: none
    chosen_reward_column: str | None = None  # a number; null: 1
    rejected_reward_column: str | None = None  # a number; null: 0
    chat: bool = False  # plain text becomes a user message; messages always use the template
    system_prompt: str | None = None  # put before chat messages that have none
    add_bos: bool = False  # begin with the BOS token, unless the text already does
    max_length: Count | None = None  # tokens; pairs with a longer sequence are dropped and counted
    shuffle: bool = True  # training pairs, by seed and epoch


@dataclass(frozen=True)
class PreferenceDataConfig(PairDataConfig):
    """The same, or for KTO rows that hold one response and its label, good or bad."""

    response_column: str = "response"  # kto: text
    label_column: str = "label"  # kto: true (or 1) where the response is good


@dataclass(frozen=True)
class TrainerDPOConfig(SupervisedLoopConfig):
    """The loop; a step is one optimizer update."""

    loss: PreferenceLossName = "dpo"  # simpo has no reference; kto learns from single responses
    # Weight of the implicit reward: the cost of leaving the reference. null: 0.1, simpo 2.
    beta: Positive | None = None
    label_smoothing: NonNegative = 0.0  # dpo: share of pairs labelled the wrong way round (cDPO)
    average_logprobs: bool = False  # dpo, ipo, rpo: mean over a response's tokens, not their sum
    distance: Literal["square", "forward_kl", "backward_kl"] = "backward_kl"  # rpo: from reward gap
    reward_scale: Positive = 1.0  # rpo: of the data's rewards
    target_margin: float = 1.0  # simpo: gamma, by how much the chosen response is to lead
    sft_weight: NonNegative = 0.0  # of the chosen response's likelihood in the loss; not kto
    desirable_weight: Annotated[float, Range(low=0.0)] = 1.0  # kto: of good responses
    undesirable_weight: Annotated[float, Range(low=0.0)] = 1.0  # kto: of bad responses

    @property
    def is_paired(self) -> bool:
        """True if an example is two responses, in adjacent rows."""
        return self.loss != "kto"

    @property
    def has_reference(self) -> bool:
        """True if the loss reads the log-probs of the initial weights."""
        return self.loss != "simpo"


@dataclass(frozen=True)
class DPOTrainerConfig(TrainingConfig):
    """The trainer of a preference run."""

    dpo: TrainerDPOConfig = field(default_factory=TrainerDPOConfig)
