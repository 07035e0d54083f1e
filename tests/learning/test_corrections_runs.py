"""Corrections in whole runs of the tiny model, whose sampler has a repetition penalty that the
trainer does not know: the two differ from the first token on.

1. Every kind, with what it meets in a run, and the numbers do not depend on the micro-batch.
2. Where a filter differs from the trainer's, what it kept is recorded and used again.

Both of conversations, too.
"""

from string import ascii_lowercase

import pytest
from recipes import near, numbers
from test_environments_learn import run as converse
from test_extend import PACKED, run
from variants import extended_except

PENALTY = "model.ppo.sampling_params.repetition_penalty=1.3"
SMALL = [
    *(PENALTY, "model.ppo.num_rollout_samples=32", "model.ppo.length_params.max_length=6"),
    *("data.validation.arguments.size=8", "trainer.ppo.val_check_interval=0"),
]
KEY = "model.ppo.correction"
TOKEN = [f"{KEY}.weights=token", f"{KEY}.bounds=[0.99,1.01]"]
CASES = {
    "masked samples, two updates, adapters, packed": (
        "grpo_tiny_cpu",
        [
            *(*TOKEN, f"{KEY}.outside=mask", "trainer.ppo.improper_end.mode=mask"),
            f"model.ppo.sampling_params.end_strings=[{','.join(ascii_lowercase)}]",
            *("model.ppo.length_params.max_length=8", "model.global_batch_size=16"),
            *("model.peft.peft_scheme=lora", *PACKED),
        ],
        "train_optim/weights_outside",
    ),
    "GSPO, dynamic sampling, DTensor": (
        "grpo_tiny_cpu",
        [
            *(f"{KEY}.weights=sequence", f"{KEY}.geometric_bounds=[0.999,1.001]"),
            *("model.ppo.ratio_level=sequence", "model.ppo.loss_aggregation=sequence_mean"),
            *("trainer.ppo.dynamic_sampling.enabled=true", "model.global_batch_size=32"),
            "policy.backend=dtensor",
        ],
        "train_optim/tokens_rejected",
    ),
    "critic, KL in the reward, two epochs, top-k": (
        "ppo_tiny_cpu",
        [
            *(f"{KEY}.old_logprobs=sampler", "model.ppo.ppo_epochs=2"),
            *("model.global_batch_size=32", "critic.global_batch_size=32"),
            "model.ppo.sampling_params.top_k=40",
        ],
        "train_optim/clip_fraction",
    ),
    "CISPO, second moment, two updates": (
        "grpo_tiny_cpu",
        [f"{KEY}.second_moment=2.0e-6", "model.ppo.surrogate=cispo", "model.global_batch_size=16"],
        "train_optim/tokens_over_second_moment",
    ),
    "conversations, second moment, sequence weights": (
        "ppo_tiny_guessing_cpu",
        [
            *(
                f"{KEY}.weights=sequence",
                f"{KEY}.bounds=[0.99,1.01]",
                f"{KEY}.second_moment=2.0e-6",
            ),
            *("model.ppo.num_rollout_samples=16", "data.validation=null"),
            *("environment.concurrency=4", "model.ppo.length_params.max_length=2"),
            *("model.global_batch_size=8", "critic.global_batch_size=8"),
        ],
        "train_optim/weights_outside",
    ),
}


def lines_of(folder):
    """What every step wrote, times and the validation of a run's last step aside."""
    return numbers(folder, "val_")


@pytest.mark.parametrize("case", extended_except(list(CASES)[:1], CASES))
def test_every_kind_in_a_run_of_any_micro_batch(tmp_path, tiny_nemo, case):
    recipe, options, metric = CASES[case]
    runs = []
    for rows in (8, 2):
        micro = [f"model.micro_batch_size={rows}"]
        micro += [f"critic.micro_batch_size={rows}"] if recipe.startswith("ppo") else []
        run(tmp_path / str(rows), tiny_nemo, recipe, 2, *SMALL, *options, *micro)
        runs.append(lines_of(tmp_path / str(rows)))
    for line, other in zip(*runs, strict=True):
        assert other == near(line)
    first = runs[0][-1 if "conversations" in case else 1]
    assert 0 < first[metric] <= 1
    assert first["sampler/logprob_gap_mean"] > 1e-3
    assert first["sampler/kl_k3"] > 0
    assert first["sampler/token_mult_prob_error"] > 1
    if "masked samples" in case:
        assert 0 < first["train_rollouts/masked_samples"] < 32
    if "conversations" in case:
        assert first["train_rollouts/turns"] > 1
        assert 0 < first["train_optim/tokens_over_second_moment"] < 1


def test_recorded_tokens_leave_no_gap_and_no_kl(tmp_path, tiny_nemo):
    """A ban of EOS changes what top-p keeps, and the trainer does not know of it."""
    gaps = {}
    for recorded in (0, 259):
        folder = tmp_path / str(recorded)
        options = [
            *(*SMALL[1:], "model.ppo.sampling_params.top_p=0.8", *PACKED),
            *("model.ppo.length_params.min_length=4", "model.ppo.kl_loss.coef=0.01"),
            f"model.ppo.record_kept_tokens={recorded}",
            # Two updates: the second has its log-probs scored.
            *("model.global_batch_size=16", "model.micro_batch_size=8"),
        ]
        run(folder, tiny_nemo, "grpo_tiny_cpu", 2, *options)
        gaps[recorded] = [line["sampler/logprob_gap_max"] for line in lines_of(folder)[1:]]
    assert min(gaps[0]) > 1e-3
    assert max(gaps[259]) < 1e-4


def test_recorded_tokens_of_conversations_have_ratio_one(tmp_path, tiny_nemo):
    """PPO's ratio begins at the sampler, so that before the first update it is that of the gap.

    The trainer's own set has the end of sequence that the sampler's may not have: a ratio below 1.
    """
    ratios = {}
    for recorded in (0, 259):
        options = [
            *("trainer.ppo.max_steps=1", "model.ppo.num_rollout_samples=8"),
            *("data.validation=null", "environment.concurrency=8"),
            *("model.global_batch_size=8", "critic.global_batch_size=8"),
            *("model.micro_batch_size=4", "critic.micro_batch_size=4"),
            *("model.ppo.sampling_params.top_p=0.8", "model.ppo.length_params.max_length=6"),
            *("model.ppo.length_params.min_length=6", "environment.max_tokens=160"),
            f"model.ppo.record_kept_tokens={recorded}",
            f"{KEY}.old_logprobs=sampler",
        ]
        converse(tmp_path / str(recorded), tiny_nemo, *options)
        (line,) = [one for one in lines_of(tmp_path / str(recorded)) if one["step"]]
        assert line["train_rollouts/turns"] > 1
        ratios[recorded] = line["train_optim/ppo_ratio"], line["train_optim/ppo_ratio_max"]
    assert ratios[259] == pytest.approx((1, 1), abs=1e-5)
    assert ratios[0][0] < 0.999
