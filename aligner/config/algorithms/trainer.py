"""Length of a run, and the settings of the algorithm that belong to no single role."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import StrictBool, StrictFloat, StrictStr

from aligner.catalog import ESTIMATORS
from aligner.config.algorithms.process import TrainingConfig
from aligner.config.combinations import ReadIf
from aligner.config.fields import (
    Count,
    Fraction,
    Integer,
    Natural,
    NonNegative,
    Positive,
    one_of,
)
from aligner.config.roles.sampling import KLEstimator


@dataclass(frozen=True)
class KLControllerConfig:
    """Controller of the weight of the KL penalty in the reward."""

    mode: Literal["fixed", "adaptive"] = "fixed"
    """Course of the weight β of the KL in the reward.

    `fixed`, or `adaptive`: β moves to hold the target (Ziegler et al. 2019).
    """

    target: Positive = 6.0
    """`adaptive`: KL per response, in nats."""

    horizon: Count = 10_000
    """`adaptive`: samples over which β moves by a fifth at most.

    A factor of e takes five times as many; see the formula in docs/ppo.md#the-mathematics.
    """

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse a controller that moves a weight of 0."""
        if self.mode == "adaptive" and run.trainer.ppo.initial_policy_kl_penalty == 0:
            yield (
                f"{key}.mode=adaptive multiplies the weight of the KL penalty, and "
                "trainer.ppo.initial_policy_kl_penalty=0 stays 0; give the weight to begin with "
                "(0.01), or set the mode to fixed"
            )


Estimator = Annotated[StrictStr, one_of(ESTIMATORS, or_path="package.module:function")]


@dataclass(frozen=True)
class AdvantageConfig:
    """Advantages of the tokens of a response, given its reward."""

    estimator: Estimator = "gae"
    """Way from rewards to advantages, with a critic (`gae`) or without.

    Without: `reinforce`, `rloo`, `grpo`, `dr_grpo`, `reinforce_plus_plus`,
    `reinforce_plus_plus_baseline`; see docs/reinforce.md. Or a function of your own,
    `package.module:function` or `path/to/file.py:function`, with a critic where the section
    `critic` is given (docs/howto.md#an-estimator-of-advantages).
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of a function of your own."""

    batch_baseline: StrictBool = False
    """`reinforce`: subtract the mean reward of the batch."""

    credit: Literal["trajectory", "turn"] = "trajectory"
    """Without a critic: what is compared inside a group.

    `trajectory`: the sum of a conversation's rewards. `turn`: for each turn, what was earned from
    it on (docs/environments.md#credit).
    """

    @property
    def function(self) -> str | None:
        """Path of the function that computes the advantages; None for a built-in formula."""
        entry = ESTIMATORS.get(self.estimator)
        return self.estimator if entry is None else entry.function

    @property
    def is_own(self) -> bool:
        """True if the estimator is a function, not a built-in formula."""
        return self.function is not None

    @property
    def reads_gae_lambda(self) -> bool:
        """True if the estimator may take γ and λ."""
        return self.estimator == "gae" or self.is_own

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse an estimator without what it needs, and options of another."""
        estimator = f"{key}.estimator={self.estimator}"
        if self.estimator == "gae" and run.critic is None:
            yield (f"{estimator} needs a critic, and critic is null; give the section, or use rloo")
        if self.estimator != "gae" and not self.is_own and run.critic is not None:
            yield (
                f"{estimator} has no critic, and the section critic is given; run aligner "
                "train-reinforce (examples/train_gpt_reinforce.py), where critic is null, or set "
                "critic=null"
            )
        if self.kwargs and not self.is_own:
            yield (
                f"{key}.kwargs={dict(self.kwargs)} are of a function of your own, and {estimator}; "
                f"leave them out, or give its path as {key}.estimator"
            )
        entry, per_prompt = ESTIMATORS.get(self.estimator), run.model.ppo.num_rollouts_per_prompt
        if entry is not None and entry.compares_group and per_prompt < 2:
            yield (
                f"{estimator} compares responses to one prompt, and "
                f"model.ppo.num_rollouts_per_prompt={per_prompt}; set it to 2 or more (4 to 16 are "
                "usual)"
            )
        if self.batch_baseline and self.estimator != "reinforce":
            yield (
                f"{key}.batch_baseline=true is an option of reinforce, and {estimator}; set it to "
                "false"
            )
        if self.credit == "turn":
            yield from self._credit_problems(key, run)

    def _credit_problems(self, key: str, run: Any) -> Iterator[str]:
        if not run.has_environment:
            yield _without_turns(f"{key}.credit")
        if self.reads_gae_lambda:
            yield (
                f"{key}.credit=turn says what is compared inside a group, and {key}.estimator="
                f"{self.estimator}; leave it out (with gae, rewards stand at their turns in any "
                "case)"
            )
        if self.batch_baseline:
            yield (
                f"{key}.batch_baseline=true is one number for all responses, and {key}.credit="
                "turn; set one of them to false or trajectory"
            )


def _without_turns(key: str) -> str:
    return (
        f"{key}=turn is for conversations of several turns, and environment.factory is null; leave "
        "it out"
    )


@dataclass(frozen=True)
class DynamicSamplingConfig:
    """Prompts whose responses all earn the same are replaced by others (DAPO)."""

    enabled: StrictBool = False
    """Replace prompts whose responses all earn the same by others (DAPO).

    Prompts that were replaced count in `max_epochs`, too: the run ends when they are used up.
    """

    max_rollouts: Count = 4
    """A step asks at most so many times its number of prompts.

    After the first rollout only for those that are missing; what is missing in the end is filled
    with such prompts.
    """

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse groups in which nothing can differ, and schedules without an end."""
        if not self.enabled:
            return
        key, per_prompt = f"{key}.enabled=true", run.model.ppo.num_rollouts_per_prompt
        if per_prompt < 2:
            yield (
                f"{key} looks for prompts whose responses differ in reward, and "
                f"model.ppo.num_rollouts_per_prompt={per_prompt}; set it to 2 or more"
            )
        for role in ("model", "critic") if run.trainer.ppo.max_steps < 0 else ():
            section = getattr(run, role)
            sched = None if section is None else section.optim.sched
            if sched is not None and sched.name != "constant" and sched.max_steps is None:
                yield (
                    f"{role}.optim.sched.name={sched.name} decays over the updates of the run, and "
                    f"with {key} nobody knows how many trainer.ppo.max_epochs makes; set "
                    f"{role}.optim.sched.max_steps or trainer.ppo.max_steps"
                )


@dataclass(frozen=True)
class RewardShapingConfig:
    """Shaping of a reward before it is used: first scale and shift, then clip."""

    scale: StrictFloat = 1.0
    """Factor of the reward."""

    shift: StrictFloat = 0.0
    """Added after the factor."""

    clip: Positive | None = None
    """Then the reward is kept within ±clip (of conversations that of a token); null: off."""

    overlong_cache: Natural | None = None
    """DAPO's soft punishment over so many last tokens before `max_length`; null: off.

    There a response pays up to 1, and one that did not end pays 1.
    """

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse a punishment of all lengths, and what conversations do not have."""
        cache, longest = self.overlong_cache, run.model.ppo.length_params.max_length
        if cache is not None and cache > longest:
            yield (
                f"{key}.overlong_cache={cache} is more than model.ppo.length_params.max_length="
                f"{longest}; lower it"
            )
        if cache is not None and run.has_environment:
            yield (
                f"{key}.overlong_cache={cache} speaks of the length of a single response, and "
                "environment.factory is set; set it to null"
            )
        if self.shift != 0 and run.has_environment:
            yield (
                f"{key}.shift={self.shift:g} would be paid for every turn, so that more of them "
                "pay more; set it to 0"
            )


@dataclass(frozen=True)
class ImproperEndConfig:
    """Treatment of responses that ran into the length limit."""

    mode: Literal["keep", "mask", "penalize"] = "keep"
    """Treatment of responses that ran into the length limit.

    `keep`, `mask` (they do not count) or `penalize`.
    """

    penalty: Annotated[
        NonNegative,
        ReadIf(
            lambda run: run.trainer.ppo.improper_end.mode == "penalize",
            "needs trainer.ppo.improper_end.mode=penalize",
        ),
    ] = 1.0
    """`penalize`: subtracted from the reward, after scale, shift and clip."""


@dataclass(frozen=True)
class LoopConfig:
    """The loop of any algorithm."""

    max_epochs: Count = 1
    """Passes over the training data."""

    max_steps: Annotated[Integer, Interval(ge=-1)] = -1
    """Steps; -1: as `max_epochs` says.

    The smaller of the two wins.
    """

    val_check_interval: Natural = 10
    """Steps between validations; 0: only before step 1 and after the last."""

    save_interval: Natural = 10
    """Steps between saved run states; 0: only after the last."""

    gradient_clip_val: NonNegative = 1.0
    """Largest gradient norm of an update, each role's its own; 0: off."""

    non_finite: Literal["skip", "stop"] = "skip"
    """Answer to a NaN or infinite loss or gradient.

    `skip` that update, or `stop` the run. The samples are written to `nonfinite/` either way.
    """

    max_skipped_steps: Count = 5
    """So many steps in a row in which every update of a role was skipped end the run.

    With status 2, as all steps of a shorter run do. Each is reported on the console.
    """


@dataclass(frozen=True)
class SupervisedLoopConfig(LoopConfig):
    """The loop of an algorithm that learns from given examples; a step is one optimizer update."""

    limit_val_examples: Count | None = None
    """Validate on the first so many examples; null: on all."""


@dataclass(frozen=True)
class SamplingLoopConfig(LoopConfig):
    """The loop of an algorithm that learns from its own samples."""

    limit_val_prompts: Count | None = None
    """Validate on the first so many prompts; null: on all."""


@dataclass(frozen=True)
class TrainerPPOConfig(SamplingLoopConfig):
    """The PPO loop."""

    initial_policy_kl_penalty: NonNegative = 0.01
    """β, weight of the KL to the initial policy in the reward; 0: off."""

    kl_estimator: KLEstimator = "k1"
    """Estimator of that KL, and of `train_rollouts/init_policy_kl`.

    `k1`, `k2`, `k3` or `abs`, which is |k1|.
    """

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
    """Unit of γ and λ of `gae`: a `token`, or a `turn` of a conversation.

    With `turn` they apply between turns and are 1 within one, and whitening counts each turn once
    (docs/environments.md#credit).
    """

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    normalize_advantages: StrictBool = True
    """Whiten advantages over all counting tokens of the rollout.

    Only `gae`; the script without a critic sets false.
    """

    critic_warmup_steps: Natural = 0
    """First PPO steps that train only the critic."""

    reward: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    improper_end: ImproperEndConfig = field(default_factory=ImproperEndConfig)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse options that the estimator of advantages does not have."""
        advantage = self.advantage
        estimator = f"{key}.advantage.estimator={advantage.estimator}"
        if self.critic_warmup_steps and run.critic is None:
            yield (
                f"{key}.critic_warmup_steps={self.critic_warmup_steps}, and {estimator} has no "
                "critic; set it to 0"
            )
        if self.normalize_advantages and not advantage.reads_gae_lambda:
            yield (
                f"{key}.normalize_advantages=true takes the mean over all tokens off, also where "
                f"{estimator} has set the advantage to 0; set it to false, or use "
                "reinforce_plus_plus_baseline, which whitens by definition"
            )
        discounts = advantage.reads_gae_lambda or advantage.estimator == "reinforce_plus_plus"
        if self.discount_factor != 1 and not discounts:
            yield (
                f"{key}.discount_factor={self.discount_factor} needs rewards per token, and "
                f"{estimator} has one per response; set it to 1"
            )
        if self.timestep == "turn" and not run.has_environment:
            yield _without_turns(f"{key}.timestep")
        if self.timestep == "turn" and advantage.estimator != "gae":
            yield (
                f"{key}.timestep=turn is the unit of gae's γ and λ, and {estimator}; set it to "
                "token" + ("" if advantage.is_own else f", and {key}.advantage.credit=turn")
            )


@dataclass(frozen=True)
class TrainerConfig(TrainingConfig):
    """The trainer of a PPO run."""

    ppo: TrainerPPOConfig = field(default_factory=TrainerPPOConfig)


@dataclass(frozen=True)
class RSTrainerConfig(TrainingConfig):
    """The trainer of a rejection-sampling run."""

    rs: SamplingLoopConfig = field(default_factory=SamplingLoopConfig)
