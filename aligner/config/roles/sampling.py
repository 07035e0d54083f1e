"""Rollouts of a policy: how many, how long and how drawn; and what PPO makes of them."""

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
    """Limits of a response's length in tokens, the end-of-sequence token included."""

    max_length: Count = 64
    """Most new tokens, the end-of-sequence token included."""

    min_length: Natural = 1
    """A response cannot end before so many tokens."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse limits that no response can meet."""
        if self.min_length > self.max_length:
            yield (
                f"{key}.min_length={self.min_length} is more than {key}.max_length="
                f"{self.max_length}; lower the one or raise the other"
            )


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of the next token."""

    temperature: Positive = 1.0
    """Logits are divided by it, in training log-probs too."""

    top_k: Natural = 0
    """Draw among the so many likeliest tokens; 0: off."""

    top_p: Annotated[StrictFloat, Interval(gt=0, le=1)] = 1.0
    """Draw among the fewest likeliest tokens with this much probability; 1: off.

    After top-k.
    """

    repetition_penalty: Positive = 1.0
    """Penalty of tokens that occurred; 1: off.

    CTRL's (Keskar et al. 2019): their logits are divided by it where positive, multiplied where
    negative.
    """

    use_greedy: StrictBool = False
    """Always take the likeliest token."""

    end_strings: tuple[StrictStr, ...] = ()
    """A response ends, properly, after the first of these strings, e.g. `["\\n"]`.

    They stay in the response.
    """

    end_tokens: tuple[StrictStr, ...] = ()
    """Further tokens, as text, that end a response, e.g. `["<end_of_turn>"]`.

    Beside the tokenizer's EOS, those of `generation_config.json` and the end of a turn in the chat
    template. They count as part of it, but their text is not shown to the reward; the trained
    `.nemo` remembers them.
    """


@dataclass(frozen=True)
class SamplingOptions:
    """Lengths and sampling of responses."""

    length: LengthParams
    sampling: SamplingParams


@dataclass(frozen=True)
class KLLossConfig:
    """KL to the reference policy as a term of the loss (GRPO's place for it)."""

    coef: NonNegative = 0.0
    """Weight of the KL to the initial policy in the loss; 0: off."""

    estimator: Annotated[
        KLEstimator,
        ReadIf(lambda run: run.model.ppo.kl_loss.coef > 0, "needs model.ppo.kl_loss.coef above 0"),
    ] = "k3"
    """Estimator of that KL: `k2`, `k3` or `abs`, not `k1`.

    `k2` has the gradient of the KL itself, `k3` that of KL(reference ‖ policy). `k1` is refused: in
    a loss its mean gradient is 0.
    """

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse an estimator without gradient."""
        if self.coef > 0 and self.estimator == "k1":
            yield (
                f"{key}.estimator=k1: its gradient has mean 0 whatever the KL, so as a term of the "
                "loss it holds the policy to nothing; use k2 (the gradient of the reverse KL) or "
                "k3 (of the forward KL)"
            )


@dataclass(frozen=True)
class CorrectionConfig:
    """Correction for the distance between the policy that sampled and the one that is trained."""

    weights: Literal["none", "token", "sequence"] = "none"
    """Weights, trainer's probability over sampler's: of a `token`, of a `sequence`, or `none`.

    `token`: each token has its own. `sequence`: a response has one, the product over its tokens.
    """

    bounds: tuple[NonNegative, Positive] = (0.0, 2.0)
    """Bounds `[low, high]` of the weights."""

    outside: Literal["truncate", "mask"] = "truncate"
    """Treatment of a weight outside the bounds.

    `truncate`: it is moved to the bound. `mask`: it is 0 (IcePop).
    """

    geometric_bounds: tuple[NonNegative, Positive] | None = None
    """Bounds of a response's mean ratio, outside which it is not learned; null: off.

    The mean is the geometric one over its tokens.
    """

    second_moment: Positive | None = None
    """Largest mean of the squared log-ratio over the tokens of an update; null: off.

    The tokens of the largest are not learned, as few as it takes (M2PO, which has 0.04).
    """

    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Log-probs that the loss's ratio begins at.

    `trainer`: of the policy before it is trained on the rollout (decoupled PPO). `sampler`: those
    that the engine recorded; no pass is made for others.
    """

    @property
    def is_on(self) -> bool:
        """True if anything is corrected."""
        return self != CorrectionConfig()

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse bounds that nothing can meet, and options that cancel one another."""
        for name in ("bounds", "geometric_bounds"):
            bounds = getattr(self, name)
            if bounds is not None and not (bounds[0] <= 1 <= bounds[1] and bounds[0] < bounds[1]):
                yield (
                    f"{key}.{name}={shown(bounds)}: where sampler and trainer agree the ratio is "
                    "1, which must lie between them; give low <= 1 <= high, such as [0.5,2.0]"
                )
        ppo, weights = run.model.ppo, f"{key}.weights={self.weights}"
        cap = ppo.truncated_importance_sampling
        capped = f"model.ppo.truncated_importance_sampling={shown(cap)}"
        if self.weights == "none":
            for name in ("bounds", "outside"):
                if (value := getattr(self, name)) != getattr(CorrectionConfig, name):
                    yield (
                        f"{key}.{name}={shown(value)} is of the weights, and {weights}; set it to "
                        "token or sequence, or leave the key out"
                    )
        elif cap is not None:
            yield (
                f"{capped} is {key}.weights={ppo.ratio_level} with {key}.bounds=[0,{cap:g}], and "
                f"{weights} is given, too; leave one of them out"
            )
        if self.weights == "token" and ppo.ratio_level == "sequence":
            yield (
                f"{weights} with model.ppo.ratio_level=sequence: a response has one ratio there, "
                f"and one weight goes with it; set {key}.weights=sequence"
            )
        sampler = f"{key}.old_logprobs=sampler"
        if self.old_logprobs == "sampler" and (self.weights != "none" or cap is not None):
            yield (
                f"{sampler} has the loss's ratio begin at the sampler, so nothing is left for "
                f"{weights if cap is None else capped} to weigh; leave one of them out"
            )
        if self.old_logprobs == "sampler" and self.second_moment is not None:
            yield (
                f"{key}.second_moment={self.second_moment:g} compares the sampler with the "
                f"trainer's log-probs before training, which {sampler} leaves out; set "
                f"{key}.old_logprobs=trainer"
            )


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of a policy's rollouts, in every algorithm that learns from its own samples."""

    num_rollout_samples: BatchSize = 64
    """Responses per step, over all ranks."""

    num_rollouts_per_prompt: Count = 1
    """Responses to the same prompt.

    Divides `num_rollout_samples`; a step draws the quotient of prompts.
    """

    rollout_micro_batch_size: Count = 64
    """Sequences in flight together while generating, per rank.

    One that ends leaves and a waiting one enters. The KV cache grows with it.
    """

    forward_micro_batch_size: Count = 16
    """Sequences per forward pass of log-probs, per rank."""

    offload_adam_states: StrictBool = False
    """Keep the policy's Adam moments in host memory while it does not train.

    Changes nothing on a CPU.
    """

    offload_gradients: StrictBool = False
    """Gradient buffers and float32 weights leave the device while it does not train.

    The policy's gradient buffers are freed and the optimizer's float32 weights (of a bf16 model)
    kept in host memory: 8 bytes a parameter on one process. Saving a run state brings them back
    until the next phase. Changes nothing on a CPU.
    """

    offload_weights: StrictBool = False
    """All it has on its device waits in host memory while other roles work.

    Weights, its reference's with `model.reference.mode=keep`, gradient buffers, float32 weights and
    moments, while it neither generates, scores nor trains, so that critic, reward model or engine
    have the device. Costs a copy of the weights each way in each of its phases. Saving a run state
    brings the weights back until the next phase. GPUs only.
    """

    length_params: LengthParams = field(default_factory=LengthParams)
    sampling_params: SamplingParams = field(default_factory=SamplingParams)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse responses that the prompts of a step cannot share evenly."""
        samples, per_prompt = self.num_rollout_samples, self.num_rollouts_per_prompt
        if samples % per_prompt:
            yield (
                f"{key}.num_rollout_samples={samples} is not a multiple of "
                f"{key}.num_rollouts_per_prompt={per_prompt}; nearest that work: "
                f"{multiples_near(samples, per_prompt)}"
            )


@dataclass(frozen=True)
class PolicyRSConfig(RolloutConfig):
    """One step of rejection sampling, seen from the policy."""

    num_rollouts_per_prompt: Count = 4
    top_n_rollouts: Count = 1
    """Of them the best so many are learned; of equals the earlier."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse also to keep more responses than there are."""
        yield from super().problems(key, run)
        if self.top_n_rollouts > self.num_rollouts_per_prompt:
            yield (
                f"{key}.top_n_rollouts={self.top_n_rollouts} is more than "
                f"{key}.num_rollouts_per_prompt={self.num_rollouts_per_prompt}; lower it"
            )


@dataclass(frozen=True)
class PolicyPPOConfig(RolloutConfig):
    """One PPO step, seen from the policy."""

    ppo_epochs: Count = 1
    """Passes over the same rollout."""

    ratio_eps: Fraction | tuple[Fraction, NonNegative] = 0.2
    """Clip range ε of the ratio: one number, or `[low, high]` for different sides (clip-higher).

    `low` is below 1.
    """

    ratio_level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or of a response.

    `token`, or `sequence`: one ratio for a response, the geometric mean of its tokens' (GSPO).
    """

    surrogate: Surrogate = "clip"
    """Objective that the ratio enters.

    `clip`: PPO's pessimistic bound. `cispo`: the clipped ratio is a weight without gradient of `A ·
    logprob`.
    """

    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """Mean of the tokens' losses.

    `token_mean`: over all tokens of the global batch. `sequence_mean`: over responses of their
    token means (GRPO). `fixed_length`: over responses of token sums divided by the most tokens of
    a response (Dr. GRPO): `length_params.max_length`, and of a conversation the smaller of
    `environment.max_tokens` and `environment.max_turns` times it.
    """

    dual_clip: AboveOne | None = None
    """Bound c > 1 of the ratio where the advantage is negative; null: off.

    Dual clip (Ye et al. 2020).
    """

    entropy_bonus: NonNegative = 0.0
    """Weight of the entropy in the loss; 0: off."""

    kl_loss: KLLossConfig = field(default_factory=KLLossConfig)
    loss: UserClass | None = None
    """A loss of your own in place of the built-in one; null: the built-in one.

    `package.module:Class` or `path/to/file.py:Class` (docs/howto.md#a-policy-loss).
    """

    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""

    truncated_importance_sampling: Positive | None = None
    """Cap of the trainer/sampler probability ratio as a weight; null: off.

    It weights each token, or with `ratio_level=sequence` each response (the product over its
    tokens): short for weights of `correction` within `[0, cap]`.
    """

    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    record_kept_tokens: Natural = 0
    """Most tokens kept by top-k and top-p that are recorded with each sampled one; 0: none.

    Recorded, they are used again in training and by the reference, so that ratios and KL are exact.
    Where more are kept, none is recorded, and the trainer filters anew. vLLM records where `top_k`
    is set; of an agent behind an endpoint nothing is recorded.
    """

    @property
    def ratio_eps_range(self) -> tuple[float, float]:
        """Clip range as (low, high): the ratio stays in [1 - low, 1 + high]."""
        if isinstance(self.ratio_eps, tuple):
            return self.ratio_eps
        return self.ratio_eps, self.ratio_eps

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse also arguments of no loss, and to record tokens that no engine records."""
        yield from super().problems(key, run)
        if self.loss_kwargs and self.loss is None:
            yield (
                f"{key}.loss_kwargs={dict(self.loss_kwargs)} are of a loss of your own, and "
                f"{key}.loss is null; leave them out, or give its path as {key}.loss"
            )
        if self.record_kept_tokens:
            yield from self._recording_problems(key, run)

    def _recording_problems(self, key: str, run: Any) -> Iterator[str]:
        """Sets of kept tokens that are all tokens, or that an engine does not have."""
        sampling, most = self.sampling_params, self.record_kept_tokens
        record = f"{key}.record_kept_tokens={most}"
        if sampling.top_k == 0 and sampling.top_p == 1:
            yield (
                f"{record}: top_k=0 and top_p=1 keep all tokens; set it to 0, or one of "
                f"{key}.sampling_params.top_k and top_p"
            )
        if sampling.top_k > most:
            yield (
                f"{record} is below {key}.sampling_params.top_k={sampling.top_k}, so that nothing "
                f"would be recorded; set it to {sampling.top_k}"
            )
        if run.generation.backend != "megatron":
            record = f"{record} with generation.backend={run.generation.backend}"
            yield from run.generation.engine.recording_problems(record, key, run)
