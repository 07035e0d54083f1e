"""Training loops, and settings of an algorithm that do not belong to a single role."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import StrictBool, StrictFloat, StrictStr

from aligner.catalog import ESTIMATORS
from aligner.config.algorithms.process import TrainingConfig
from aligner.config.combinations import ReadIf
from aligner.config.fields import Count, Fraction, Integer, Natural, NonNegative, Positive, one_of
from aligner.config.roles.sampling import KLEstimator


@dataclass(frozen=True)
class KLControllerConfig:
    """Controller that adapts the weight β of the KL penalty during training."""

    mode: Literal["fixed", "adaptive"] = "fixed"
    """`fixed`, or `adaptive`: β changes so that the KL reaches the target (Ziegler et al. 2019)."""

    target: Positive = 6.0
    """`adaptive`: target KL per response, in nats."""

    horizon: Count = 10_000
    """`adaptive`: samples over which β changes by at most a fifth. See
    docs/ppo.md#the-mathematics."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message if β is adapted but starts at 0, since β would stay 0."""
        if self.mode == "adaptive" and run.trainer.ppo.initial_policy_kl_penalty == 0:
            yield (
                f"{key}.mode=adaptive multiplies trainer.ppo.initial_policy_kl_penalty=0, which "
                "stays 0. Set a positive initial weight (0.01), or set the mode to fixed"
            )


Estimator = Annotated[StrictStr, one_of(ESTIMATORS, or_path="package.module:function")]


@dataclass(frozen=True)
class AdvantageConfig:
    """Estimator of token advantages, and its options."""

    estimator: Estimator = "gae"
    """Estimator of advantages, with a critic (`gae`) or without. Without a critic: `reinforce`,
    `rloo`, `grpo`, `dr_grpo`, `reinforce_plus_plus` or `reinforce_plus_plus_baseline`
    (docs/reinforce.md). Or a user-defined function, `package.module:function` or
    `path/to/file.py:function` (docs/howto.md#an-estimator-of-advantages)."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of a user-defined estimator."""

    batch_baseline: StrictBool = False
    """`reinforce`: subtract the mean reward of the batch."""

    credit: Literal["trajectory", "turn"] = "trajectory"
    """Without a critic: rewards that a group compares. `trajectory`: the sum over a conversation.
    `turn`: the sum from each turn on (docs/environments.md#credit)."""

    @property
    def function(self) -> str | None:
        """Import path of the function that computes advantages, or None for a built-in formula."""
        entry = ESTIMATORS.get(self.estimator)
        return self.estimator if entry is None else entry.function

    @property
    def reads_gae_lambda(self) -> bool:
        """True if the estimator gets γ and λ: `gae` and user-defined estimators."""
        return self.estimator == "gae" or self.function is not None

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for each option that does not fit the estimator, or is missing."""
        # Only gae uses a critic.
        estimator = f"{key}.estimator={self.estimator}"
        if self.estimator == "gae" and run.critic is None:
            remedy = f"Remove critic=null, or set {key}.estimator=rloo"
            yield f"{estimator} needs a critic, but critic is null. {remedy}"
        if self.estimator != "gae" and self.function is None and run.critic is not None:
            yield (
                f"{estimator} uses no critic, but the section critic is set. Set critic=null, or "
                "run aligner train-reinforce (examples/train_gpt_reinforce.py)"
            )

        # Options that only some estimators support.
        if self.kwargs and self.function is None:
            yield (
                f"{key}.kwargs={dict(self.kwargs)} needs a user-defined estimator, but "
                f"{estimator}. Leave it out, or set {key}.estimator to the path of a function"
            )
        built_in = ESTIMATORS.get(self.estimator)  # None for a user-defined estimator
        per_prompt = run.model.ppo.num_rollouts_per_prompt
        if built_in is not None and built_in.compares_group and per_prompt < 2:
            yield (
                f"{estimator} compares responses to one prompt, but "
                f"model.ppo.num_rollouts_per_prompt={per_prompt}. Set it to 4 to 16, at least 2"
            )
        if self.batch_baseline and self.estimator != "reinforce":
            yield f"{key}.batch_baseline=true needs reinforce, but {estimator}. Set it to false"

        # Credit for single turns of a conversation.
        if self.credit != "turn":
            return
        if not run.has_environment:
            yield f"{key}.credit{_TURN_WITHOUT_ENVIRONMENT}"
        if self.reads_gae_lambda:
            yield (
                f"{key}.credit=turn needs an estimator that compares groups, but {estimator}. "
                "Leave it out (gae always credits a reward to its turn)"
            )
        if self.batch_baseline:
            yield (
                f"{key}.batch_baseline=true subtracts one mean from all responses, but {key}."
                "credit=turn. Set batch_baseline to false, or credit to trajectory"
            )


_TURN_WITHOUT_ENVIRONMENT = (
    "=turn needs conversations, but environment.factory is null. Leave it out"
)


@dataclass(frozen=True)
class DynamicSamplingConfig:
    """Replacement of prompts whose responses all have the same reward (DAPO)."""

    enabled: StrictBool = False
    """Replace prompts whose responses all have the same reward (DAPO). Replaced prompts count
    towards `max_epochs`."""

    max_rollouts: Count = 4
    """Maximum number of prompts that a step samples, as a multiple of the prompts that it trains
    on. At the limit, prompts with equal rewards fill the step."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for groups of one response, and schedules of unknown length."""
        if not self.enabled:
            return
        key, per_prompt = f"{key}.enabled=true", run.model.ppo.num_rollouts_per_prompt
        if per_prompt < 2:
            yield (
                f"{key} compares the rewards of responses to one prompt, but "
                f"model.ppo.num_rollouts_per_prompt={per_prompt}. Set it to 2 or more"
            )
        # The number of steps is unknown before the run, unless it is limited.
        for role in ("model", "critic") if run.trainer.ppo.max_steps < 0 else ():
            section = getattr(run, role)
            sched = None if section is None else section.optim.sched
            if sched is not None and sched.name != "constant" and sched.max_steps is None:
                yield (
                    f"{role}.optim.sched.name={sched.name} decays over the updates of the run, but "
                    f"with {key} the number of updates in trainer.ppo.max_epochs is unknown. Set "
                    f"{role}.optim.sched.max_steps or trainer.ppo.max_steps"
                )


@dataclass(frozen=True)
class RewardShapingConfig:
    """Changes of a reward before training: scale and shift, clip, and a penalty on length."""

    scale: StrictFloat = 1.0
    """Factor of the reward."""

    shift: StrictFloat = 0.0
    """Constant added to the scaled reward."""

    clip: Positive | None = None
    """Bound of the reward's absolute value, after scale and shift. `null` turns it off. In
    conversations the bound applies to the reward of each token."""

    overlong_cache: Natural | None = None
    """Number of tokens before `max_length` over which DAPO's soft length penalty rises from 0 to 1.
    The penalty of a truncated response is 1. `null` turns it off."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for options that do not fit the length limit or an environment."""
        cache, lengths = self.overlong_cache, "model.ppo.length_params"
        longest = run.model.ppo.length_params.max_length
        if cache is not None and cache > longest:
            yield f"{key}.overlong_cache={cache} exceeds {lengths}.max_length={longest}. Lower it"
        if cache is not None and run.has_environment:
            yield (
                f"{key}.overlong_cache={cache} applies to single responses, but "
                "environment.factory is set. Set it to null"
            )
        if self.shift != 0 and run.has_environment:
            shift = f"{key}.shift={self.shift:g}"
            yield f"{shift} at each turn would reward the number of turns. Set it to 0"


@dataclass(frozen=True)
class ImproperEndConfig:
    """Treatment of responses that reached the length limit."""

    mode: Literal["keep", "mask", "penalize"] = "keep"
    """Truncated responses: `keep`, `mask` (exclude from training) or `penalize`."""

    penalty: Annotated[
        NonNegative,
        ReadIf(
            lambda run: run.trainer.ppo.improper_end.mode == "penalize",
            "needs trainer.ppo.improper_end.mode=penalize",
        ),
    ] = 1.0
    """`penalize`: amount subtracted from the reward, after scale, shift and clip."""


@dataclass(frozen=True)
class LoopConfig:
    """Options of the training loops of all algorithms."""

    max_epochs: Count = 1
    """Maximum number of passes over the training data."""

    max_steps: Annotated[Integer, Interval(ge=-1)] = -1
    """Maximum number of steps. `max_epochs` may end the run earlier. `-1` means no limit."""

    val_check_interval: Natural = 10
    """Steps between validations. `0` validates only before step 1 and after the last step."""

    save_interval: Natural = 10
    """Steps between saved run states. `0` saves only after the last step."""

    gradient_clip_val: NonNegative = 1.0
    """Maximum gradient norm of an update, for each role separately. `0` turns clipping off."""

    non_finite: Literal["skip", "stop"] = "skip"
    """At a NaN or infinite loss or gradient, `skip` the update, or `stop` the run. The samples are
    written to `nonfinite/` in both cases."""

    max_skipped_steps: Count = 5
    """Consecutive steps without an update of a role that end the run with status 2."""


@dataclass(frozen=True)
class SupervisedLoopConfig(LoopConfig):
    """Training loop on given examples. A step is one optimizer update."""

    limit_val_examples: Count | None = None
    """Number of validation examples. `null` means all."""


@dataclass(frozen=True)
class SamplingLoopConfig(LoopConfig):
    """Options of training loops that learn from the policy's samples."""

    limit_val_prompts: Count | None = None
    """Number of validation prompts. `null` means all."""


@dataclass(frozen=True)
class TrainerPPOConfig(SamplingLoopConfig):
    """Training loop of PPO."""

    initial_policy_kl_penalty: NonNegative = 0.01
    """Weight β of the KL to the initial policy in the reward. `0` turns the penalty off."""

    kl_estimator: KLEstimator = "k1"
    """Estimator of the KL in the reward: `k1`, `k2`, `k3` or `abs`."""

    kl_controller: KLControllerConfig = field(default_factory=KLControllerConfig)
    discount_factor: Fraction = 1.0
    """γ of `gae` and of `reinforce_plus_plus`."""

    gae_lambda: Annotated[
        Fraction,
        ReadIf(
            lambda run: run.trainer.ppo.advantage.reads_gae_lambda,
            "needs trainer.ppo.advantage.estimator=gae",
        ),
    ] = 0.95
    """λ of `gae`."""

    timestep: Literal["token", "turn"] = "token"
    """Unit of γ and λ of `gae`: a `token`, or a `turn` of a conversation. See
    docs/environments.md#credit."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    normalize_advantages: StrictBool = True
    """Whiten advantages over all unmasked tokens of the rollout. Only for `gae`."""

    critic_warmup_steps: Natural = 0
    """Number of first steps that train only the critic."""

    reward: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    improper_end: ImproperEndConfig = field(default_factory=ImproperEndConfig)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for each option that the advantage estimator does not support."""
        # Options that need a critic or an estimator.
        advantage = self.advantage
        estimator = f"{key}.advantage.estimator={advantage.estimator}"
        if self.critic_warmup_steps and run.critic is None:
            warmup = f"{key}.critic_warmup_steps={self.critic_warmup_steps}"
            yield f"{warmup} needs a critic, but {estimator} uses none. Set it to 0"
        if self.normalize_advantages and not advantage.reads_gae_lambda:
            yield (
                f"{key}.normalize_advantages=true subtracts the mean over all tokens, also where "
                f"{estimator} sets the advantage to 0. Set it to false, or use "
                "reinforce_plus_plus_baseline, which includes whitening"
            )
        discounts = advantage.reads_gae_lambda or advantage.estimator == "reinforce_plus_plus"
        if self.discount_factor != 1 and not discounts:
            yield (
                f"{key}.discount_factor={self.discount_factor} needs a reward per token, but "
                f"{estimator} uses one per response. Set it to 1"
            )

        # Turns of conversations.
        if self.timestep == "turn" and not run.has_environment:
            yield f"{key}.timestep{_TURN_WITHOUT_ENVIRONMENT}"
        if self.timestep == "turn" and advantage.estimator != "gae":
            yield (
                f"{key}.timestep=turn works only with gae, but {estimator}. Set it to token"
                + ("" if advantage.function is not None else f", and {key}.advantage.credit=turn")
            )


@dataclass(frozen=True)
class TrainerConfig(TrainingConfig):
    """Section ``trainer`` of PPO."""

    ppo: TrainerPPOConfig = field(default_factory=TrainerPPOConfig)


@dataclass(frozen=True)
class RSTrainerConfig(TrainingConfig):
    """Section ``trainer`` of rejection sampling."""

    rs: SamplingLoopConfig = field(default_factory=SamplingLoopConfig)
