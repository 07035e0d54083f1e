"""Rollouts of a policy: number, length and sampling, and their use by PPO."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import StrictBool, StrictFloat, StrictStr

from aligner.catalog import SURROGATES
from aligner.config.combinations import ReadIf, multiples_near
from aligner.config.fields import (
    AboveOne,
    BatchSize,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    UserClass,
    one_of,
)
from aligner.foreign_keys import shown

KLEstimator = Literal["k1", "k2", "k3", "abs"]
Surrogate = Annotated[StrictStr, one_of(SURROGATES)]


@dataclass(frozen=True)
class LengthParams:
    """Limits of a response's length, in tokens with the end-of-sequence token."""

    max_length: Count = 64
    """Maximum number of new tokens, the end-of-sequence token included."""

    min_length: Natural = 1
    """Minimum number of new tokens."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message if ``min_length`` exceeds ``max_length``."""
        if self.min_length > self.max_length:
            yield (
                f"{key}.min_length={self.min_length} exceeds {key}.max_length="
                f"{self.max_length}. Lower min_length or raise max_length"
            )


@dataclass(frozen=True)
class SamplingParams:
    """Options for sampling the next token."""

    temperature: Positive = 1.0
    """Divisor of the logits, in sampling and in the log-probs of training."""

    top_k: Natural = 0
    """Sample among this number of most probable tokens. `0` turns top-k off."""

    top_p: Annotated[StrictFloat, Interval(gt=0, le=1)] = 1.0
    """Sample among the fewest tokens whose total probability reaches this value. Applied after
    top-k. `1` turns top-p off."""

    repetition_penalty: Positive = 1.0
    """Penalty of tokens that already occurred (CTRL, Keskar et al. 2019). `1` turns it off."""

    use_greedy: StrictBool = False
    """Always select the most probable token."""

    end_strings: tuple[StrictStr, ...] = ()
    """Strings that end a response properly, such as `["\\n"]`. They are part of the response."""

    end_tokens: tuple[StrictStr, ...] = ()
    """Additional tokens, as text, that end a response, such as `["<end_of_turn>"]`. EOS and the
    end-of-turn token of the chat template always end it. The reward does not receive the end
    token's text. The trained `.nemo` stores these tokens."""


@dataclass(frozen=True)
class SamplingOptions:
    """Length limits and sampling options of responses."""

    length: LengthParams
    sampling: SamplingParams


@dataclass(frozen=True)
class KLLossConfig:
    """KL to the reference policy as a term of the loss, as in GRPO."""

    coef: NonNegative = 0.0
    """Weight of the KL to the initial policy in the loss. `0` turns the term off."""

    estimator: Annotated[
        KLEstimator,
        ReadIf(lambda run: run.model.ppo.kl_loss.coef > 0, "needs model.ppo.kl_loss.coef above 0"),
    ] = "k3"
    """Estimator of the KL in the loss: `k2`, `k3` or `abs`, not `k1`. See
    docs/ppo.md#the-mathematics."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for the estimator ``k1``, whose mean gradient is 0."""
        if self.coef > 0 and self.estimator == "k1":
            yield (
                f"{key}.estimator=k1 has a mean gradient of 0 and does not change the policy. Use "
                "k2 (gradient of the reverse KL) or k3 (gradient of the forward KL)"
            )


@dataclass(frozen=True)
class CorrectionConfig:
    """Correction of the difference between the sampling policy and the trained policy."""

    weights: Literal["none", "token", "sequence"] = "none"
    """Importance weights: the trainer's probability divided by the sampler's. `none`, one weight
    per `token`, or one per `sequence`: the product over its tokens (docs/corrections.md)."""

    bounds: tuple[NonNegative, Positive] = (0.0, 2.0)
    """Bounds `[low, high]` of the weights."""

    outside: Literal["truncate", "mask"] = "truncate"
    """A weight outside the bounds becomes the bound (`truncate`) or 0 (`mask`, IcePop)."""

    geometric_bounds: tuple[NonNegative, Positive] | None = None
    """Bounds of the geometric mean of a response's ratios. `null` turns the filter off. Responses
    outside the bounds are excluded from training."""

    second_moment: Positive | None = None
    """Maximum of the mean squared log-ratio over the tokens of an update. `null` turns it off. The
    tokens with the largest ratios are excluded from training (M2PO, which uses 0.04)."""

    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Old log-probs in the ratio of the loss. `trainer`: of the policy before training on the
    rollout. `sampler`: those that the engine recorded, which saves a forward pass."""

    @property
    def is_on(self) -> bool:
        """True if any correction is configured."""
        return self != CorrectionConfig()

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for bounds that exclude 1, and for options without effect."""
        # Bounds must include 1, the ratio of equal policies.
        for name in ("bounds", "geometric_bounds"):
            bounds = getattr(self, name)
            if bounds is not None and not (bounds[0] <= 1 <= bounds[1] and bounds[0] < bounds[1]):
                yield (
                    f"{key}.{name}={shown(bounds)} excludes 1, the ratio if sampler and trainer "
                    "agree. Set low <= 1 <= high, such as [0.5,2.0]"
                )

        # Importance weights, which truncated_importance_sampling (`cap`) sets as well.
        ppo = run.model.ppo
        cap = ppo.truncated_importance_sampling
        weights = f"{key}.weights={self.weights}"
        cap_setting = f"model.ppo.truncated_importance_sampling={shown(cap)}"
        if self.weights == "none":
            for name in ("bounds", "outside"):
                if (value := getattr(self, name)) != getattr(CorrectionConfig, name):
                    yield (
                        f"{key}.{name}={shown(value)} needs weights, but {weights}. Set {key}."
                        f"weights to token or sequence, or leave out {name}"
                    )
        elif cap is not None:
            yield (
                f"{cap_setting} means {key}.weights={ppo.ratio_level} with "
                f"{key}.bounds=[0,{cap:g}], but {weights} is also set. Leave one of them out"
            )
        if self.weights == "token" and ppo.ratio_level == "sequence":
            yield (
                f"{weights} with model.ppo.ratio_level=sequence: one ratio per response needs one "
                f"weight per response. Set {key}.weights=sequence"
            )

        # With the sampler's log-probs as old log-probs, nothing is left to correct.
        sampler = f"{key}.old_logprobs=sampler"
        if self.old_logprobs == "sampler" and (self.weights != "none" or cap is not None):
            yield (
                f"{sampler} already corrects the ratio of the loss, so that "
                f"{weights if cap is None else cap_setting} has no effect. Leave one of them out"
            )
        if self.old_logprobs == "sampler" and self.second_moment is not None:
            yield (
                f"{key}.second_moment={self.second_moment:g} needs the trainer's log-probs before "
                f"training, which {sampler} does not compute. Set {key}.old_logprobs=trainer"
            )


@dataclass(frozen=True)
class RolloutConfig:
    """Options of rollouts, for all algorithms that learn from the policy's own samples."""

    num_rollout_samples: BatchSize = 64
    """Responses per step, over all ranks."""

    num_rollouts_per_prompt: Count = 1
    """Responses to the same prompt. It must divide `num_rollout_samples`."""

    rollout_micro_batch_size: Count = 64
    """Sequences that are generated at the same time, per rank. Sets the size of the KV cache."""

    forward_micro_batch_size: Count = 16
    """Sequences per forward pass of log-probs, per rank."""

    offload_adam_states: StrictBool = False
    """Keep the policy's Adam moments in host memory while the policy does not train. No effect on
    CPUs."""

    offload_gradients: StrictBool = False
    """Free gradient buffers on the device while the policy does not train, and keep the float32
    weights of a bf16 model in host memory. No effect on CPUs."""

    offload_weights: StrictBool = False
    """Keep the policy in host memory while it neither generates, scores nor trains. GPUs only.
    Offloads weights, also of the reference, gradient buffers and optimizer states. Each phase
    copies the weights to the device and back."""

    length_params: LengthParams = field(default_factory=LengthParams)
    sampling_params: SamplingParams = field(default_factory=SamplingParams)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message if samples do not divide into groups of equal size."""
        samples, per_prompt = self.num_rollout_samples, self.num_rollouts_per_prompt
        if samples % per_prompt:
            yield (
                f"{key}.num_rollout_samples={samples} is not a multiple of "
                f"{key}.num_rollouts_per_prompt={per_prompt}. Use "
                f"{multiples_near(samples, per_prompt)}"
            )


@dataclass(frozen=True)
class PolicyRSConfig(RolloutConfig):
    """The policy's options in rejection sampling."""

    num_rollouts_per_prompt: Count = 4
    top_n_rollouts: Count = 1
    """Number of responses to each prompt that are learned: those with the highest rewards. Of equal
    rewards, the earlier response is selected."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield the base class's messages, and one if more responses are selected than sampled."""
        yield from super().problems(key, run)
        if self.top_n_rollouts > self.num_rollouts_per_prompt:
            yield (
                f"{key}.top_n_rollouts={self.top_n_rollouts} exceeds "
                f"{key}.num_rollouts_per_prompt={self.num_rollouts_per_prompt}. Lower it"
            )


@dataclass(frozen=True)
class PolicyPPOConfig(RolloutConfig):
    """Options of the policy in PPO: its rollouts, loss and importance-sampling correction."""

    ppo_epochs: Count = 1
    """Number of passes over the same rollout."""

    ratio_eps: Fraction | tuple[Fraction, NonNegative] = 0.2
    """Clip range ε of the ratio: a number, or `[low, high]` for different bounds (clip-higher).
    `low` is below 1."""

    ratio_level: Literal["token", "sequence"] = "token"
    """One ratio per `token`, or per `sequence`: the geometric mean over its tokens (GSPO)."""

    surrogate: Surrogate = "clip"
    """Objective as a function of the ratio. `clip`: PPO's pessimistic bound. `cispo`: `A ·
    logprob`, weighted by the clipped ratio without its gradient."""

    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """Mean of the token losses. `token_mean`: mean over all tokens of the global batch.
    `sequence_mean`: mean over responses of their token means (GRPO). `fixed_length`: mean over
    responses of their token sums, divided by the length limit of a response or conversation (Dr.
    GRPO)."""

    dual_clip: AboveOne | None = None
    """Bound c > 1 of the ratio for negative advantages (Ye et al. 2020). `null` turns it off."""

    entropy_bonus: NonNegative = 0.0
    """Weight of the entropy in the loss. `0` turns the bonus off."""

    kl_loss: KLLossConfig = field(default_factory=KLLossConfig)
    loss: UserClass | None = None
    """A user-defined loss, `package.module:Class` or `path/to/file.py:Class`. `null` means the
    built-in loss (docs/howto.md#a-policy-loss)."""

    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor of the user-defined loss."""

    truncated_importance_sampling: Positive | None = None
    """Upper bound of importance weights (docs/corrections.md). `null` turns them off."""

    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    record_kept_tokens: Natural = 0
    """Maximum number of tokens to record per position, of those that top-k and top-p keep. `0`
    records none (docs/corrections.md#recorded-top-k-and-top-p-sets)."""

    @property
    def ratio_eps_range(self) -> tuple[float, float]:
        """The clip range as (low, high): the ratio is clipped to [1 - low, 1 + high]."""
        if isinstance(self.ratio_eps, tuple):
            return self.ratio_eps
        return self.ratio_eps, self.ratio_eps

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield error messages for ``loss_kwargs`` without a loss, and for useless recording."""
        yield from super().problems(key, run)
        if self.loss_kwargs and self.loss is None:
            yield (
                f"{key}.loss_kwargs={dict(self.loss_kwargs)} needs a user-defined loss, but "
                f"{key}.loss is null. Leave it out, or set {key}.loss to the path of the class"
            )
        if self.record_kept_tokens == 0:
            return

        # Recording of filtered tokens.
        sampling, most = self.sampling_params, self.record_kept_tokens
        record = f"{key}.record_kept_tokens={most}"
        if sampling.top_k == 0 and sampling.top_p == 1:
            yield (
                f"{record}: top_k=0 and top_p=1 keep all tokens. Set it to 0, or set "
                f"{key}.sampling_params.top_k or top_p"
            )
        if sampling.top_k > most:
            yield (
                f"{record} is below {key}.sampling_params.top_k={sampling.top_k}, so that no "
                f"tokens would be recorded. Set it to {sampling.top_k}"
            )
        if run.generation.backend != "megatron":
            record = f"{record} with generation.backend={run.generation.backend}"
            yield from run.generation.engine.recording_problems(record, key, run)
