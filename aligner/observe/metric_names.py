"""Every metric the library writes: its name, its meaning, and its denominator.

A metric that is not here and has none of the free prefixes cannot be written, so this page is
complete. ``python -m aligner.observe.metric_names`` prints it as Markdown.
"""

import difflib
from collections.abc import Iterable
from typing import NamedTuple

from aligner.errors import ConfigError


class MetricInfo(NamedTuple):
    """Meaning of a metric. ``over``: its denominator, or how it is combined."""

    meaning: str
    over: str = "one number"


_SAMPLES = "mean over the step's samples"
_TOKENS = "mean over generated tokens that count (token_mask · sample_mask)"
_TURNS = "with trainer.ppo.timestep=turn over turns, each by the state before it"
_STATES = f"{_TOKENS}; {_TURNS}"
_MINI_BATCHES = "mean over the step's optimizer updates"
_TRAINED = "mean over trained tokens of a global batch, then over the step's updates"

_ROLLOUT = {
    "rewards": MetricInfo("Reward of a response as the reward function gave it.", _SAMPLES),
    "rewards_std": MetricInfo("Unbiased standard deviation of the rewards.", "samples - 1"),
    "rewards_min": MetricInfo("Smallest reward.", "minimum over samples"),
    "rewards_max": MetricInfo("Largest reward.", "maximum over samples"),
    "accuracy": MetricInfo(
        "Share of responses that the verifier accepts; where it gives no verdict, reward of at "
        "least 1. A conversation that counts and has no score is wrong; in validation all count.",
        _SAMPLES,
    ),
    "generation_length": MetricInfo("Tokens generated, end-of-sequence included.", _SAMPLES),
    "generation_length_std": MetricInfo(
        "Unbiased standard deviation of the response length in tokens.", "samples - 1"
    ),
    "generation_length_min": MetricInfo("Shortest response in tokens.", "minimum over samples"),
    "generation_length_max": MetricInfo("Longest response in tokens.", "maximum over samples"),
    "prompt_length": MetricInfo("Tokens of the prompt.", _SAMPLES),
    "fraction_of_samples_properly_ended": MetricInfo(
        "Share of responses ended by EOS or a stop string, not by the length limit.", _SAMPLES
    ),
    "reward_length_correlation": MetricInfo(
        "Pearson correlation of reward and response length. Near 1: length is being rewarded. "
        "Undefined (NaN) where either is constant.",
        "samples",
    ),
    "repeated_ngram_fraction": MetricInfo(
        "Share of a response's 3-grams that occurred in it before. Rising: degenerate text.",
        "mean over samples with at least 3 generated tokens",
    ),
    "reward_timeouts": MetricInfo(
        "Responses for which the reward function did not answer in time.", "count"
    ),
    "num_samples": MetricInfo("Responses in this rollout.", "count"),
    "generated_tokens": MetricInfo("Tokens generated in this rollout.", "count"),
}

_CONVERSATIONS = {
    "accuracy_of_answered": MetricInfo(
        "The accuracy of those that were scored. Undefined (NaN) where none was.",
        "conversations with a reward",
    ),
    "turns": MetricInfo("Messages of the policy in a conversation.", _SAMPLES),
    "ended_done": MetricInfo("Share of conversations that their environment ended.", "samples"),
    "ended_max_turns": MetricInfo("Share that ended after environment.max_turns.", "samples"),
    "ended_max_tokens": MetricInfo("Share that had no room for another response.", "samples"),
    "ended_failed": MetricInfo("Share that failed and earned 0 (environment.failed).", "samples"),
    "forks": MetricInfo(
        "Times that a conversation went on with another sequence, its template having rewritten "
        "what was said.",
        "count",
    ),
    "failed_env_timeout": MetricInfo(
        "Conversations that failed because their environment did not answer in time.", "count"
    ),
    "failed_env_error": MetricInfo(
        "Conversations that failed because their environment raised or died.", "count"
    ),
    "failed_engine_error": MetricInfo(
        "Conversations begun again because the engine raised instead of answering.", "count"
    ),
    "unscored_samples": MetricInfo(
        "Conversations without any reward. Those that a limit ended earn 0, unless "
        "environment.unscored=mask; others train nothing. In validation all earn 0.",
        "count",
    ),
}

_TRAIN_ROLLOUT = {
    "init_policy_kl": MetricInfo(
        "KL divergence to the initial policy: the configured estimator on the sampled tokens.",
        _TOKENS,
    ),
    "init_policy_kl_per_sample": MetricInfo(
        "KL divergence to the initial policy, summed over a response; the adaptive controller "
        "keeps it at its target.",
        _SAMPLES,
    ),
    "kl_penalty": MetricInfo(
        "KL penalty subtracted from the reward: coefficient times KL, summed over a response.",
        _SAMPLES,
    ),
    "kl_coefficient": MetricInfo("Weight of the KL penalty in the reward."),
    "rewards_with_kl": MetricInfo("Reward after shaping, less the KL penalty.", _SAMPLES),
    "shaped_rewards": MetricInfo(
        "Reward after scale, shift, clip and the penalty for not ending.", _SAMPLES
    ),
    "advantages_mean": MetricInfo("Advantage before whitening.", _STATES),
    "advantages_std": MetricInfo(
        "Unbiased standard deviation of the advantage before whitening.", "counted tokens - 1"
    ),
    "advantages_min": MetricInfo("Smallest advantage before whitening.", "minimum over tokens"),
    "advantages_max": MetricInfo("Largest advantage before whitening.", "maximum over tokens"),
    "returns_mean": MetricInfo("Target of the critic: advantage plus value.", _STATES),
    "returns_std": MetricInfo(
        "Unbiased standard deviation of the critic's target.", "counted tokens - 1"
    ),
    "masked_samples": MetricInfo(
        "Samples that do not count: they did not end, or were not scored.", "count"
    ),
    "samples_with_signal": MetricInfo(
        "Without a critic: share of samples whose prompt has responses of different rewards, after "
        "shaping and before any KL penalty. The others give no gradient where the prompt's other "
        "responses are the baseline.",
        "the step's samples",
    ),
    "kept_rewards": MetricInfo(
        "Rejection sampling: reward of the responses that are learned.", "the responses kept"
    ),
    "samples_drawn": MetricInfo(
        "With dynamic sampling: responses sampled to fill the step's rollout.", "count"
    ),
}

_OPTIMIZER = {
    "loss": MetricInfo("The loss that was minimised.", _TRAINED),
    "grad_norm": MetricInfo("Norm of the whole gradient before clipping.", _MINI_BATCHES),
    "lr": MetricInfo("Learning rate of the step's last update."),
    "optimizer_steps": MetricInfo("Optimizer updates since the run began.", "count"),
    "skipped_updates": MetricInfo(
        "Updates of this step left out because loss or gradient was not finite.", "count"
    ),
    "empty_updates": MetricInfo(
        "Updates of this step left out because no sample of the mini-batch counts.", "count"
    ),
}

_ACTOR = {
    "kl_loss": MetricInfo("KL to the reference policy inside the loss, unweighted.", _TRAINED),
    "approx_kl": MetricInfo("KL (k3) from the policy that sampled to the one trained.", _TRAINED),
    "entropy": MetricInfo("Entropy of the next-token distribution, in nats.", _TRAINED),
    "ppo_ratio": MetricInfo("Probability ratio new/old policy. 1: on-policy.", _TRAINED),
    "ppo_ratio_max": MetricInfo(
        "Largest probability ratio new/old policy.", "maximum over trained tokens"
    ),
    "ppo_ratio_clamped": MetricInfo("Probability ratio new/old policy after clipping.", _TRAINED),
    "clip_fraction": MetricInfo(
        "Share of tokens whose gradient the clip removed. Above 0.3: learning rate too high.",
        _TRAINED,
    ),
    "dual_clip_fraction": MetricInfo("Share of tokens held by the dual clip.", _TRAINED),
    "importance_weight": MetricInfo(
        "Importance weight trainer/sampler as applied (1 where they agree).", _TRAINED
    ),
    "effective_sample_size": MetricInfo(
        "Share of a batch that its weights leave: (Σ w)² / (n · Σ w²). 1: all weigh the same. "
        "Undefined (NaN) where all are 0.",
        "tokens of a global batch, then mean over the step's updates",
    ),
    "weights_outside": MetricInfo(
        "Share of tokens whose weight was outside the bounds of the correction.", _TRAINED
    ),
    "tokens_rejected": MetricInfo(
        "Share of tokens in responses that `geometric_bounds` rejects.", _TRAINED
    ),
    "tokens_over_second_moment": MetricInfo(
        "Share of tokens that `second_moment` masks.", _TRAINED
    ),
}

_CRITIC = {
    "explained_var": MetricInfo(
        "1 - Var(returns - values) / Var(returns), values before training. 1: perfect, 0: no "
        "better than a constant, negative: worse. Undefined (NaN) where returns are constant.",
        f"counted tokens; {_TURNS}",
    ),
    "values_mean": MetricInfo("Predicted value before training.", _STATES),
    "values_std": MetricInfo(
        "Unbiased standard deviation of the predicted value before training.", "counted tokens - 1"
    ),
    "values_min": MetricInfo("Smallest predicted value.", "minimum over tokens"),
    "values_max": MetricInfo("Largest predicted value.", "maximum over tokens"),
    "clip_fraction": MetricInfo("Share of values held by the value clip.", _TRAINED),
}

_SAMPLER = {
    "logprob_gap_mean": MetricInfo(
        "Absolute difference of the sampler's and the trainer's log-prob of the same token. In "
        "float32 on the own engine it is rounding (below 0.0001), in bf16 a few hundredths; "
        "asynchronous rollouts add what an update changes. Far above that the engines disagree.",
        _TRAINED,
    ),
    "logprob_gap_max": MetricInfo(
        "Largest absolute difference of the sampler's and the trainer's log-prob of one token.",
        "maximum over trained tokens",
    ),
    "kl_k1": MetricInfo(
        "KL(sampler ‖ trainer) on the sampled tokens, k1: may be negative where they are close.",
        _TRAINED,
    ),
    "kl_k3": MetricInfo(
        "KL(sampler ‖ trainer) on the sampled tokens, k3: never negative.", _TRAINED
    ),
    "reverse_kl_k1": MetricInfo(
        "KL(trainer ‖ sampler) on the sampled tokens, weighted by trainer/sampler, k1.", _TRAINED
    ),
    "reverse_kl_k3": MetricInfo(
        "KL(trainer ‖ sampler) on the sampled tokens, weighted by trainer/sampler, k3: never "
        "negative.",
        _TRAINED,
    ),
    "token_mult_prob_error": MetricInfo(
        "Factor by which the two probabilities of a token differ, at least 1 (as NeMo-RL). Above "
        "1.05 the engines disagree.",
        _TRAINED,
    ),
    "tokens_above_ln2": MetricInfo(
        "Share of tokens that one of the two finds more than twice as probable.", _TRAINED
    ),
}

_SUPERVISED = {
    "loss": MetricInfo("The loss.", _TRAINED),
    "token_probability": MetricInfo("Probability of a token that is learned.", _TRAINED),
    "forward_kl": MetricInfo(
        "Distillation: KL(teacher ‖ student) over the teacher's top k tokens.", _TRAINED
    ),
    "backward_kl": MetricInfo(
        "Distillation: KL(student ‖ teacher), with the loss's term for other tokens.", _TRAINED
    ),
    "topk_probability": MetricInfo(
        "Distillation: the student's probability of the teacher's top k tokens.", _TRAINED
    ),
    "preference_loss": MetricInfo("The preference loss, without other terms.", "pairs"),
    "rewards_chosen": MetricInfo("(Implicit) reward of the chosen response.", "pairs"),
    "rewards_rejected": MetricInfo("(Implicit) reward of the rejected response.", "pairs"),
    "rewards_margin": MetricInfo(
        "Reward of the chosen less that of the rejected; KTO: how far the reward is on the right "
        "side of the baseline.",
        "pairs; KTO: sequences",
    ),
    "accuracy": MetricInfo(
        "Share of pairs whose chosen response has the higher reward; KTO: of sequences on the "
        "right side of the baseline.",
        "pairs; KTO: sequences",
    ),
    "rewards": MetricInfo("KTO: implicit reward.", "sequences"),
    "desirable_fraction": MetricInfo("KTO: share of good responses.", "sequences"),
    "kl_baseline": MetricInfo(
        "KTO: drift from the reference on mismatched responses, in nats, at least 0.",
        "rows of the global batch",
    ),
    "sft_loss": MetricInfo("The likelihood term on the chosen response, unweighted.", "pairs"),
    "absolute_error": MetricInfo(
        "Absolute difference of score and rating, a mean over the rated attributes.", "sequences"
    ),
}

_SUPERVISED_DATA = {
    "tokens": MetricInfo("Tokens of the update's global batch.", "count"),
    "learned_tokens": MetricInfo("Those of them that enter the loss.", "count"),
}

_PROGRESS = {
    "epoch": MetricInfo("Passes over the training prompts that have begun, from 0.", "count"),
    "consumed_samples": MetricInfo(
        "Samples since the run began: responses sampled, also those that were replaced or not "
        "kept, or examples learned from.",
        "count",
    ),
}


def _under(group: str, *tables: dict[str, MetricInfo]) -> dict[str, MetricInfo]:
    return {f"{group}/{name}": info for table in tables for name, info in table.items()}


METRICS: dict[str, MetricInfo] = {
    **_under("train_rollouts", _ROLLOUT, _CONVERSATIONS, _TRAIN_ROLLOUT),
    **_under("val_rollouts", _ROLLOUT, _CONVERSATIONS),
    **_under("train_optim", _SUPERVISED, _OPTIMIZER, _ACTOR),
    **_under("val_optim", _SUPERVISED),
    **_under("train_data", _SUPERVISED_DATA),
    **_under("critic", _OPTIMIZER, _CRITIC),
    **_under("sampler", _SAMPLER),
    **_under("progress", _PROGRESS),
}

# Names below these are the user's or the machine's to choose.
PREFIXES: dict[str, MetricInfo] = {
    "timers/": MetricInfo(
        "Seconds of a phase of the step, or a rate that depends on time. Never compared.", "sum"
    ),
    "train_rollouts/reward_parts/": MetricInfo(
        "A number the reward function returned beside the reward.", _SAMPLES
    ),
    "val_rollouts/reward_parts/": MetricInfo(
        "A number the reward function returned beside the reward, on validation prompts.", _SAMPLES
    ),
    "val_rollouts/mean_at_": MetricInfo(
        "Share of right answers among k responses to each prompt; `_stderr`: its standard error.",
        "mean over prompts",
    ),
    "val_rollouts/pass_at_": MetricInfo(
        "Probability that one of k responses is right, unbiased (Chen et al. 2021); `_stderr`.",
        "mean over prompts",
    ),
    "val_rollouts/maj_at_": MetricInfo(
        "Accuracy of the most frequent final answer of k responses; `_stderr`.",
        "mean over prompts",
    ),
    "val_sets/": MetricInfo(
        "`val_sets/NAME/*`: the metrics of `val_rollouts/*` for the set of `validation.sets`.",
        "as there",
    ),
    "custom/": MetricInfo("Written by code outside the library."),
}


def describe(name: str) -> MetricInfo | None:
    """Meaning of the metric; None: unknown."""
    if name in METRICS:
        return METRICS[name]
    return next((info for prefix, info in PREFIXES.items() if name.startswith(prefix)), None)


def check_names(names: Iterable[str]) -> None:
    """Refuse metrics without an explanation."""
    for name in names:
        if describe(name) is None:
            near = difflib.get_close_matches(name, METRICS, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(
                f"metric {name!r} has no explanation{meant} Add it to METRICS in "
                f"aligner/observe/metric_names.py or use a prefix of {', '.join(PREFIXES)}"
            )


def markdown() -> str:
    """All metrics as a Markdown table, for the documentation."""
    lines = ["| metric | meaning | over |", "|---|---|---|"]
    entries = {**METRICS, **{f"{prefix}*": info for prefix, info in PREFIXES.items()}}
    lines += [f"| `{name}` | {info.meaning} | {info.over} |" for name, info in entries.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
