"""Several responses to a prompt: what they come to, how they are drawn, and sets with a name."""

import itertools
import math

import pytest
import torch
from loaded import load_policy, load_set, write_rows
from settings import parsed
from test_generation_ahead import assert_same

from aligner.algorithms.rollout.inputs import Prompts
from aligner.algorithms.rollout.rollout import SingleResponses
from aligner.algorithms.rollout.validation import validate_on_prompts
from aligner.algorithms.run.loop import StepResult
from aligner.config import LengthParams, SamplingOptions, SamplingParams
from aligner.config.cli import check_overrides
from aligner.data.prompts import PromptDataset
from aligner.errors import ConfigError
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.observe.estimates import (
    answer_estimates,
    ks_of,
    majority_at_k,
    mean_over_prompts,
    pass_at_k,
)
from aligner.observe.metrics import check_names
from aligner.rewards.answers import final_answer
from aligner.rewards.function.runner import ScoredResponses


@pytest.mark.parametrize("right", [[1, 0, 0, 1, 0], [0] * 5, [1] * 5, [1, 0, 0, 0, 0]])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(right, k):
    subsets = list(itertools.combinations(right, k))
    assert pass_at_k(right, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("right", "answers", "expected"),
    [
        ([1, 1, 0, 0, 0], ["4", "4", "5", "6", "7"], 1.0),
        ([1, 0, 0], ["4", "5", "5"], 0.0),
        ([1, 0], ["4", "5"], 0.5),  # a tie: each its share
        ([1, 0, 0], ["4", None, None], 1.0),  # no answer, no vote
        ([0, 0], [None, None], 0.0),
        ([1, 0, 0], ["4", "4", "5"], 0.5),  # the verifier is of two minds about "4"
    ],
)
def test_majority(right, answers, expected):
    assert majority_at_k(right, answers, len(right)) == expected


def test_estimates_by_hand():
    found = mean_over_prompts([0.0, 1.0, 1.0, 0.5])
    assert found.value == 0.625
    assert found.error == pytest.approx(math.sqrt(((0.625**2) + 2 * 0.375**2 + 0.125**2) / 3 / 4))
    assert mean_over_prompts([0.3]) == (0.3, None)
    # Two prompts, four responses: 1 of 4 and 3 of 4 right.
    right = [[1, 0, 0, 0], [1, 1, 1, 0]]
    answers = [["a", "b", "b", "c"], ["x", "x", "x", "y"]]
    found = answer_estimates(right, answers)
    assert set(found) == {"mean_at_4", "pass_at_1", "pass_at_2", "pass_at_4", "maj_at_4"}
    assert found["mean_at_4"] == (0.5, pytest.approx(0.25))
    assert found["pass_at_1"] == found["mean_at_4"]
    assert found["pass_at_2"].value == pytest.approx((0.5 + 1.0) / 2)
    assert found["pass_at_4"] == (1.0, 0.0)
    assert found["maj_at_4"].value == 0.5
    assert ks_of(6) == [1, 2, 4, 6]
    answers = ["4", "4", "5", "6", "6", "4", "4"]
    assert majority_at_k([1, 1, 0, 0, 0, 0, 1], answers, 3) == 0.5  # the seventh is in no group


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} and \boxed{x^{2}} at last", "x^{2}"),
        (r"\boxed{12} then \boxed{unfinished", "12"),
        ("5 apples\n#### 1,234.50\nnoise", "1234.5"),
        ("first 3, then -0.50.", "-0.5"),
        ("007", "7"),
        ("-0", "0"),
        ("Yes.\nIt is Paris ", "It is Paris"),
        (r"\boxed{$42$}", "42"),
        ("", None),
        ("  \n", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


class OddReward:
    """Responses whose tokens have an odd sum are right."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def get_rewards(self, data):
        names = ("input_ids", "prompt_lengths", "input_lengths")
        rows = zip(*(data[name].tolist() for name in names), strict=True)
        tokens = [row[start:end] for row, start, end in rows]
        texts = [self.tokenizer.decode(ids) for ids in tokens]
        right = [float(sum(ids) % 2) for ids in tokens]
        return ScoredResponses(texts, torch.tensor(right) * 2 - 1, {"accuracy": right})


@pytest.fixture(scope="module", params=["megatron", "dtensor"])
def validator(request, tiny_nemo, tmp_path_factory):
    """A function from settings of ``validation`` to the outcome of a validation."""
    folder = tmp_path_factory.mktemp("prompts")
    rows = [{"prompt": f"{one}+{one + 1}=", "ground_truth": "1"} for one in range(6)]
    for name, first in (("a", 0), ("b", 3)):
        write_rows(folder / f"{name}.jsonl", rows[first:])

    def configured(**validation):
        return parsed(
            {
                "model.restore_from_path": str(tiny_nemo),
                "model.ppo": {"num_rollout_samples": 8, "length_params": {"max_length": 6}},
                "policy.backend": request.param,
                "data.validation.source": "v.jsonl",
                "validation": validation,
            }
        )

    policy = load_policy(configured().model, backend=request.param, init_optimizer=False)
    tokenizer = policy.tokenizer
    prompts = {name: load_set(PromptDataset, folder / f"{name}.jsonl", tokenizer) for name in "ab"}

    def validate(sets=(), **validation) -> StepResult:
        config = configured(**validation)
        others = {name: prompts[name] for name in sets}
        held_out = Prompts(prompts["a"], prompts["a"], others).held_out
        reward = OddReward(tokenizer)
        source, pad_id = SingleResponses(), tokenizer.pad_id
        return validate_on_prompts(config, source, policy, reward, held_out, 0, pad_id)

    return validate


def exactly(metrics):
    """To the bit; what is undefined (NaN) is so in both."""
    return pytest.approx(metrics, rel=0, abs=0, nan_ok=True)


def texts(outcome):
    return [(sample.prompt, sample.response) for sample in outcome.samples]


@pytest.mark.integration
def test_settings_and_sets_of_validation(validator):
    plain = validator()
    assert {name.split("/")[0] for name in plain.metrics} == {"val_rollouts"}
    assert not any("_at_" in name for name in plain.metrics)
    assert plain.metrics["val_rollouts/num_samples"] == 6
    # Without settings a prompt has one response, drawn as in training.
    same = validator(temperature=1.0, top_p=1.0, max_length=6, use_greedy=False)
    assert same.metrics == exactly(plain.metrics)
    assert same.samples == plain.samples
    greedy = validator(use_greedy=True)
    assert texts(greedy) != texts(plain)
    assert texts(validator(top_k=1)) == texts(greedy)
    short = validator(max_length=3)
    assert short.metrics["val_rollouts/generation_length_max"] <= 3
    assert all(
        long.response.startswith(cut.response[:2])
        for long, cut in zip(plain.samples, short.samples, strict=True)
    )
    # Nothing of these settings stays, and a set has the same numbers beside others.
    both = validator(sets="b")
    check_names(both.metrics)
    own = {name: value for name, value in both.metrics.items() if name.startswith("val_rollouts/")}
    assert own == exactly(plain.metrics)
    assert texts(both)[: len(plain.samples)] == texts(plain)
    assert both.metrics["val_sets/b/num_samples"] == 3
    assert len(both.samples) == len(plain.samples) + 3
    several = validator(samples_per_prompt=4)
    found = several.metrics
    check_names(found)
    assert found["val_rollouts/num_samples"] == 24
    assert 0 < found["val_rollouts/mean_at_4"] == pytest.approx(found["val_rollouts/accuracy"])
    assert 0 < found["val_rollouts/mean_at_4_stderr"] < 0.5
    assert [sample.sample_id for sample in several.samples] == [0, 4, 8, 12]


def test_keys_of_a_named_set_are_checked_on_the_command_line():
    given = "validation.sets.math.source=m.jsonl"
    assert check_overrides([given]) == [f"++{given}"]
    with pytest.raises(ConfigError, match=r"validation\.sets\.math\.sauce: unknown key"):
        check_overrides(["validation.sets.math.sauce=m.jsonl"])
    with pytest.raises(ConfigError, match=r"validation\.sets\.a b: a set's name"):
        parsed({"validation.sets": {"a b": {"source": "x.jsonl"}}})


@pytest.mark.integration
def test_stop_strings_and_lengths_of_one_call(tiny_nemo):
    """A call with sampling options of its own is what a generator set up so would give."""
    actor = load_from_nemo(MegatronGPTActorModel, restore_path=tiny_nemo)
    prompts, rows = torch.arange(40, 52).view(3, 4), torch.arange(3)
    lengths = torch.full((3,), 4)
    sampling_options = SamplingOptions(
        LengthParams(max_length=12, min_length=2),
        SamplingParams(temperature=0.7, end_strings=("e", "a", "1", " ")),
    )

    def sample(**options):
        return actor.generator.sample(prompts, lengths, rows, seed=3, **options)

    before, asked, after = sample(), sample(sampling_options=sampling_options), sample()
    actor.configure_generation(sampling_options.length, sampling_options.sampling, 64)
    assert_same(after, before)
    assert_same(sample(), asked)
    wrong = SamplingOptions(LengthParams(max_length=3, min_length=4), SamplingParams())
    with pytest.raises(ConfigError, match="min_length=4 is above"):
        sample(sampling_options=wrong)
