"""The run: how long, on what, and the settings of the algorithm that belong to no one role."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from aligner.config.fields import (
    Aliases,
    Count,
    Fraction,
    Names,
    Natural,
    NonNegative,
    Positive,
    Range,
    Refused,
    UserClass,
)
from aligner.config.roles.model import KLEstimator


@dataclass(frozen=True)
class KLControllerConfig:
    """Controller of the weight of the KL penalty in the reward."""

    mode: Literal["fixed", "adaptive"] = "fixed"  # adaptive: Ziegler et al. 2019
    target: Positive = 6.0  # adaptive: KL per sequence, in nats, to hold
    horizon: Count = 10_000  # adaptive: samples over which the weight moves by a fifth at most


ESTIMATORS = (
    "gae",
    "reinforce",
    "rloo",
    "grpo",
    "dr_grpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)
Estimator = Annotated[str, Names(ESTIMATORS, or_path=True)]


@dataclass(frozen=True)
class AdvantageConfig:
    """Advantages of the tokens of a response, given its reward."""

    # gae: a critic tells (PPO). The others need none, and no critic is built: responses to the same
    # prompt, or of the same batch, are each other's baseline (`losses.group_advantages`).
    # package.module:function: one of the user's own (`algorithms.user_estimator`), with a critic
    # where the section critic is given.
    estimator: Estimator = "gae"
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of a function of the user's own
    batch_baseline: bool = False  # reinforce: less the mean reward of the batch

    @property
    def is_own(self) -> bool:
        """True if the estimator is a function of the user's own."""
        return self.estimator not in ESTIMATORS


@dataclass(frozen=True)
class DynamicSamplingConfig:
    """Prompts whose responses all earn the same are replaced by others (DAPO)."""

    enabled: bool = False
    max_rollouts: Count = 4  # a step asks at most so many times its number of prompts


@dataclass(frozen=True)
class RewardShapingConfig:
    """Shaping of a reward before it is used: first scale and shift, then clip."""

    scale: float = 1.0  # R <- scale * R + shift
    shift: float = 0.0
    clip: Positive | None = None  # R <- clamp(R, -clip, clip); null: off
    # DAPO's soft punishment: over so many last tokens before length_params.max_length the reward
    # falls by up to 1; a response that did not end pays 1. null: off.
    overlong_cache: Natural | None = None


@dataclass(frozen=True)
class ImproperEndConfig:
    """Treatment of responses that ran into the length limit."""

    mode: Literal["keep", "mask", "penalize"] = "keep"  # mask: such samples do not count
    penalty: NonNegative = 1.0  # penalize: subtracted from the reward


@dataclass(frozen=True)
class LoopConfig:
    """The loop of any algorithm."""

    max_epochs: Count = 1  # passes over the training data
    max_steps: Annotated[int, Range(low=-1)] = -1  # steps; -1: as max_epochs says
    val_check_interval: Natural = 10  # steps between validations; 0: only first and last
    save_interval: Natural = 10  # steps between saved run states; 0: only at the end
    gradient_clip_val: NonNegative = 1.0  # largest gradient norm of a step; 0: off
    # A loss or gradient that is NaN or infinite: skip that optimizer step, or stop the run.
    non_finite: Literal["skip", "stop"] = "skip"
    max_skipped_steps: Count = 5  # steps in a row without a single update that end the run


@dataclass(frozen=True)
class SupervisedLoopConfig(LoopConfig):
    """The loop of an algorithm that learns from given examples; a step is one optimizer update."""

    limit_val_examples: Count | None = None  # validate on the first so many; null: on all


@dataclass(frozen=True)
class SamplingLoopConfig(LoopConfig):
    """The loop of an algorithm that learns from its own samples."""

    limit_val_prompts: Count | None = None  # validate on the first so many; null: on all


@dataclass(frozen=True)
class TrainerPPOConfig(SamplingLoopConfig):
    """The PPO loop."""

    initial_policy_kl_penalty: NonNegative = 0.01  # weight of the KL in the reward; 0: off
    kl_estimator: KLEstimator = "k1"  # of the KL in the reward; abs is |k1|
    kl_controller: KLControllerConfig = field(default_factory=KLControllerConfig)
    discount_factor: Fraction = 1.0  # gamma of gae and of reinforce_plus_plus
    gae_lambda: Fraction = 0.95  # lambda of gae
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    normalize_advantages: bool = True  # mean 0 and variance 1 over all tokens of the rollout
    critic_warmup_steps: Natural = 0  # first PPO steps that train the critic alone
    reward: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    improper_end: ImproperEndConfig = field(default_factory=ImproperEndConfig)


# Lightning's spellings. bf16 is megatron-core's: bfloat16 weights in the passes, float32 ones in
# the optimizer.
_PRECISIONS = Aliases((("32-true", "32"), ("bf16-mixed", "bf16"), ("bf16-true", "bf16")))
_FLOAT16 = (
    "float16 needs a loss scale, which no role here keeps; use bf16, or 32 where there is none"
)
_NO_FLOAT16 = Refused(tuple((name, _FLOAT16) for name in ("16", "16-mixed", "16-true", "fp16")))
Precision = Annotated[Literal["32", "bf16"], _PRECISIONS, _NO_FLOAT16]


@dataclass(frozen=True)
class ProcessConfig:
    """Processes, precision and limits."""

    num_nodes: Count = 1
    devices: Count = 1  # processes per node
    precision: Precision = "32"  # of weights in the forward pass; heads stay float32
    # On GPUs take operations whose sums are always made in one order: slower, and the same run
    # twice is the same to the bit, resumed or not. On CPU it is in any case.
    deterministic: bool = False
    max_time: str | None = None  # DD:HH:MM:SS; then the run saves and ends cleanly

    @property
    def max_seconds(self) -> float | None:
        """``max_time`` in seconds."""
        return None if self.max_time is None else parse_duration(self.max_time)

    @property
    def world_size(self) -> int:
        """Processes that the run asks for."""
        return self.num_nodes * self.devices


@dataclass(frozen=True)
class CallbackConfig:
    """A callback with arguments."""

    callback: UserClass  # package.module:Class or path/to/file.py:Class
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of its constructor


@dataclass(frozen=True)
class TrainingConfig(ProcessConfig):
    """Processes of a run that trains, and its callbacks."""

    # The user's own classes (`algorithms.callbacks.Callback`) that are told of steps, validations
    # and saved states: package.module:Class, or {callback: ..., kwargs: {...}}.
    callbacks: tuple[UserClass | CallbackConfig, ...] = ()


@dataclass(frozen=True)
class TrainerConfig(TrainingConfig):
    """The trainer of a PPO run."""

    ppo: TrainerPPOConfig = field(default_factory=TrainerPPOConfig)


@dataclass(frozen=True)
class RSTrainerConfig(TrainingConfig):
    """The trainer of a rejection-sampling run."""

    rs: SamplingLoopConfig = field(default_factory=SamplingLoopConfig)


def parse_duration(text: str) -> float:
    """Seconds of ``DD:HH:MM:SS``; ``ValueError`` where it is not that."""
    match = re.fullmatch(r"(\d{1,6}):(\d\d):([0-5]\d):([0-5]\d)", text)
    if match is None:
        raise ValueError(f"{text!r} is not DD:HH:MM:SS")
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
