"""Corrections in whole runs of the tiny model, whose sampler has a repetition penalty that the
trainer does not know: the two differ from the first token on.

Every kind, with what it meets in a run and of conversations; the numbers do not depend on the
micro-batch.
"""

from string import ascii_lowercase

import pytest
from recipes import near, numbers
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


@pytest.mark.parametrize("case", extended_except(list(CASES)[:1], CASES))
def test_every_kind_in_a_run_of_any_micro_batch(tmp_path, tiny_nemo, case):
    recipe, options, metric = CASES[case]
    runs = []
    for rows in (8, 2):
        micro = [f"model.micro_batch_size={rows}"]
        micro += [f"critic.micro_batch_size={rows}"] if recipe.startswith("ppo") else []
        run(tmp_path / str(rows), tiny_nemo, recipe, 2, *SMALL, *options, *micro)
        # Without the validation of a run's last step.
        runs.append(numbers(tmp_path / str(rows), "val_"))
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
