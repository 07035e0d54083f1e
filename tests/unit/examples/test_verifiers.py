"""The verifiers that come with the library, one sample at a time."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from loaded import load_set

from aligner.data.prompts import PromptDataset
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import ConfigError, RewardError
from aligner.examples.tasks import exact_number, reasoning
from aligner.rewards import math_verify, regex_format
from aligner.rewards.function.runner import RewardFunction


@pytest.mark.parametrize(
    ("responses", "is_end", "accuracy", "well_formed"),
    [
        (["21\n", "21\n\n", "21"], True, 1, 1),
        (["21\n"], False, 1, 1),
        (["21"], False, 0, 0),  # truncated: 210 may have been meant
        (["22\n", "210\n", "-21\n"], True, 0, 1),
        ([" 21\n", "21 \n", "021\n", "+21\n", "21.\n", "21.0\n", "2１\n"], True, 0, 0),
        (["21\n5+5=", "20\n21\n", "\n21\n", "21\r\n", "-0\n", "\n", ""], True, 0, 0),
    ],
)
def test_exact_number(responses, is_end, accuracy, well_formed):
    count = len(responses)
    scores = exact_number.reward(["9+12="] * count, responses, ["21"] * count, [is_end] * count)
    expected = {"reward": accuracy, "accuracy": accuracy, "well_formed": well_formed}
    assert scores == [expected] * count


def test_exact_number_of_other_kinds_and_with_a_prefix():
    pairs = [(21, "21"), (21.0, "21"), (0, "0"), ("0.25", "0.25"), (" 7 ", "7")]
    pairs += [("0.25", ".25"), (0.5, "0.50")]
    truths, responses = zip(*pairs, strict=True)
    scores = exact_number.reward([""] * 7, responses, truths, [True] * 7)
    assert [score["reward"] for score in scores] == [1, 1, 1, 1, 1, 0, 0]
    responses = [" 21\n", "21\n", "  21\n"]
    scores = exact_number.reward([""] * 3, responses, ["21"] * 3, [True] * 3, prefix=" ")
    assert [score["reward"] for score in scores] == [1.0, 0.0, 0.0]


@pytest.mark.integration
def test_exact_number_needs_a_number_to_compare_with():
    with (
        closing(RewardFunction("aligner.examples.tasks.exact_number:reward")) as function,
        pytest.raises(RewardError, match=r"'two' is not a number.* on sample 1"),
    ):
        function(["a", "b"], ["1\n", "2\n"], ["1", "two"], {"is_end": [True, True]})


PATTERN = r"<think>.*?</think>\s*<answer>(?P<answer>[^<]*)</answer>\s*"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>well\n2+3</think>\n<answer> 5 </answer>", (1.0, 1.0, 1.0)),
        ("<think></think><answer>6</answer>", (0.1, 0.0, 1.0)),
        ("<answer>5</answer>", (0.0, 0.0, 0.0)),
        ("<think></think><answer>5</answer> or 6", (0.0, 0.0, 0.0)),
        ("<think></think><answer>6</answer><answer>5</answer>", (0.0, 0.0, 0.0)),
    ],
)
def test_regex_format(response, expected):
    score = regex_format.reward([""], [response], [5], pattern=PATTERN, format_reward=0.1)[0]
    assert (score["reward"], score["accuracy"], score["well_formed"]) == expected
    scores = regex_format.reward([""] * 2, ["yes.", "yes"], [None] * 2, pattern=r"\w+\.")
    assert [score["reward"] for score in scores] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("response", "ground_truth", "right"),
    [
        (r"so $\frac{2}{4}$", "1/2", 1),
        ("0.5", r"\frac12", 1),
        (r"therefore \boxed{1/2}.", 0.5, 1),
        ("The answer is 12.", 12, 1),
        (r"\boxed{1,234}", "1234", 1),
        ("1/3", "1/2", 0),
        ("", "1/2", 0),
        ("nothing", "1/2", 0),
        (r"\boxed{1/2} \boxed{1/3}", "1/2", 0),  # two answers are no answer
        (r"$x=2$", "$2$", 1),
    ],
)
def test_math_verify(response, ground_truth, right):
    assert math_verify.reward([""], [response], [ground_truth])[0]["reward"] == right


def test_math_verify_in_a_box_outside_the_main_thread_and_without_a_truth():
    responses = [r"\boxed{1/2}", "$1/2$", "1/2", r"\boxed{} 1/2"]
    scores = math_verify.reward([""] * 4, responses, ["1/2"] * 4, boxed=True)
    assert [score["reward"] for score in scores] == [1.0, 0.0, 0.0, 0.0]
    with ThreadPoolExecutor() as threads:
        (score,) = threads.submit(math_verify.reward, [""], ["1/2"], ["0.5"]).result()
    assert score["reward"] == 1.0
    with pytest.raises(ValueError, match="cannot read the ground truth ''"):
        math_verify.reward([""], ["1"], [""])


def reasoning_gym(**arguments):
    source = "aligner.examples.tasks.reasoning:reasoning_gym_prompts"
    return load_set(PromptDataset, source, byte_level_tokenizer(), arguments=arguments)


@pytest.mark.integration
def test_reasoning_gym_from_prompt_to_reward():
    dataset = reasoning_gym(task="simple_equations", size=3, seed=1, suffix=" Answer:")
    assert dataset[0].text.endswith(" Answer:")
    assert dataset.column_names == {"task", "entry"}
    columns = {name: [prompt.columns[name] for prompt in dataset] for name in ("task", "entry")}
    right = [prompt.ground_truth for prompt in dataset]
    texts = [prompt.text for prompt in dataset]
    with closing(RewardFunction("aligner.examples.tasks.reasoning:reward")) as function:
        output = function(texts, [right[0], f"{right[1]}1", ""], right, columns)
    assert output.rewards[0] == 1.0
    assert output.rewards[1] < 1.0
    assert output.parts["accuracy"] == [1.0, 0.0, 0.0]
    assert output.parts["well_formed"] == [1.0, 1.0, 0.0]


@pytest.mark.integration
def test_reasoning_gym_answer_in_a_tag():
    entry = {"question": "?", "answer": "13", "metadata": {"source_dataset": "simple_equations"}}
    responses = ["<answer>13</answer>", "13", "<answer>13</answer><answer>4</answer>"]
    scores = reasoning.reward(
        [""] * 3, responses, ["13"] * 3, ["simple_equations"] * 3, [entry] * 3, answer_tag="answer"
    )
    assert [score["accuracy"] for score in scores] == [1.0, 0.0, 0.0]


@pytest.mark.integration
@pytest.mark.parametrize("arguments", [{"task": "nope"}, {"task": "simple_equations", "nope": 1}])
def test_reasoning_gym_refusals(arguments):
    with pytest.raises(ConfigError, match="nope"):
        reasoning_gym(**arguments)
