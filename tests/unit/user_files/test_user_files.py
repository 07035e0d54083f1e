"""Files of users: objects and functions that travel between processes, and who is to blame."""

import pickle

import pytest
import reward_cases
from reward_cases import score

from aligner.errors import ConfigError, DataError, RewardError
from aligner.importing import load_function

pytestmark = pytest.mark.integration

module, load = reward_cases.module, reward_cases.load


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_functions_run_in_processes_of_any_start_method(load, method):
    function = load("in_processes", kwargs={"method": method})
    assert score(function, ["a"] * 3).rewards.tolist() == [0.0, 1.0, 4.0]


def test_objects_of_a_file_travel_and_columns_that_are_not_taken_stay(module, load):
    (row,) = load_function(f"{module}:truths", key="data")()
    assert pickle.loads(pickle.dumps(row["ground_truth"])) == row["ground_truth"]
    columns = {"check": [row["check"]]}
    assert score(load("of_truths"), ["a"], [row["ground_truth"]], columns).rewards.tolist() == [2.0]
    with pytest.raises(DataError, match=r"takes_checks'.* object that cannot be pickled.*lambda"):
        score(load("takes_checks"), ["a"], columns=columns)


def test_functions_of_a_file_and_their_failures(load):
    function = load("judged")
    for responses in (["a", "bb", "ccc"], ["dddd", "e", "ff"]):
        assert score(function, responses).rewards.tolist() == [float(len(r)) for r in responses]
    function = load("judge_is_down")
    with pytest.raises(RewardError, match=r"judge is down.* on the batch as a whole"):
        score(function, ["a", "b"])  # each alone fails of something else
    with pytest.raises(RewardError, match=r"judge is down.* on the batch as a whole"):
        score(function, ["always", "always"])  # each alone fails in the same way
    with pytest.raises(RewardError, match=r"ValueError: \?"):
        score(load("hostile_error"), ["a"])


def test_clashing_columns_and_keys_are_refused(load):
    function = load("clashes")
    with pytest.raises(DataError, match=r"parameters \['data_source'\].*Rename the parameters"):
        function.signature.check_columns(["data_source", "is_end"])
    function.signature.check_columns(["level", "is_end"])
    with pytest.raises(ConfigError, match=r"reward.kwargs contains \['data_source'\]"):
        load("clashes", kwargs={"data_source": 1})
    with pytest.raises(RewardError, match=r"sample 0 .*the key 3 is not text"):
        score(load("integer_keys"), ["a"])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("cos\n_exit\n(I7\ntR.", "JSONDecodeError"),
        ('[1, "scores", [NaN]]', "ValueError"),
        ('[1, "scores", [1e999]]', "RewardError"),
        ('[1, "scores", [1, 2]]', "RewardError"),
        ('[1, "scores", 1]', "RewardError"),
        ('[1, "refused", 3]', "TypeError"),
        ('[1, "refused", [3, 3]]', "TypeError"),
        ("[1]", "ValueError"),
        ('[[], {}, ""]', "TypeError"),
        ("[" * 100_000, "RecursionError"),
        ("[" + "[]," * 2**21 + "1]", "ValueError"),
    ],
    ids=lambda value: value[:20],
)
def test_forged_answers_are_no_answers(load, answer, said):
    with pytest.raises(RewardError, match=rf"sent an invalid answer \({said}\)"):
        score(load("forges"), [answer])
