"""Reward functions in the forms of TRL, verl and OpenRLHF, called as their libraries call them."""

import numpy as np
import pytest
import torch

from aligner.data.chat import MESSAGES
from aligner.errors import ConfigError, DataError, RewardError
from aligner.rewards.function.execution import LoadedFunction
from aligner.rewards.protocol import Samples

CHAT = [{"role": "user", "content": "2+3?"}]
TRUTHS = ["5", "6"]


def scored(function, columns=None, kwargs=None):
    loaded = LoadedFunction(function, function.__name__, kwargs or {})
    samples = Samples(["a", "b"], ["x5", "y6"], TRUTHS, columns or {})
    return loaded.signature.form, *loaded.score(samples)


def test_trl_gets_completions_and_columns():
    seen = []

    def reward(completions, answer, bonus=0.0, **kwargs):
        seen.append((completions, answer, kwargs))
        return [bonus + (a in c) for c, a in zip(completions, answer, strict=True)]

    columns = {"answer": ["5", "7"], "level": [1, 2]}
    assert scored(reward, columns, {"bonus": 1.0}) == ("TRL", [2.0, 1.0], {})
    assert seen[0][:2] == (["x5", "y6"], ["5", "7"])
    assert seen[0][2] == {"prompts": ["a", "b"], "ground_truth": TRUTHS, "level": [1, 2]}

    def of_messages(prompts, completions, ground_truth):
        assert prompts == [CHAT, "b"]
        assert completions == [[{"role": "assistant", "content": "x5"}], "y6"]
        return [float(truth) for truth in ground_truth]

    columns = {MESSAGES: [CHAT, None], "unused": [0, 0]}
    assert scored(of_messages, columns) == ("TRL", [5.0, 6.0], {})


@pytest.mark.parametrize("is_async", [False, True])
def test_verl_gets_one_sample_a_call(is_async):
    seen = []

    def compute(data_source, solution_str, ground_truth, extra_info=None, scale=1):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": scale * float(ground_truth), "is_short": len(solution_str) < 3}

    async def compute_later(data_source, solution_str, ground_truth, extra_info=None, scale=1):
        return compute(data_source, solution_str, ground_truth, extra_info, scale)

    columns = {"data_source": ["m", "n"], "extra_info": [{"i": 0}, {"i": 1}], MESSAGES: [CHAT] * 2}
    function = compute_later if is_async else compute
    assert scored(function, columns, {"scale": 2}) == ("verl", [10.0, 12.0], {"is_short": [1, 1]})
    assert seen == [("m", "x5", "5", {"i": 0}), ("n", "y6", "6", {"i": 1})]


def test_openrlhf_gets_a_batch_of_queries():
    def reward_func(queries, prompts, labels, **kwargs):
        assert (queries, prompts, labels) == (["ax5", "by6"], ["a", "b"], TRUTHS)
        return torch.tensor([1.0, 0.5])

    def with_logs(queries, prompts):
        return {"rewards": np.array([1.0, 0.0]), "extra_logs": {"length": torch.tensor([3, 4])}}

    assert scored(reward_func) == ("OpenRLHF", [1.0, 0.5], {})
    assert scored(with_logs) == ("OpenRLHF", [1.0, 0.0], {"length": [3.0, 4.0]})

    def ours(prompts, responses, ground_truths, completions=None, queries=None):
        return [1.0] * len(responses)

    assert scored(ours) == ("", [1.0, 1.0], {})  # the library's own form has precedence


def trl_with_ids(completions, completion_ids): ...


def verl(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "6":
        raise ValueError("bad")
    return 1.0


def test_refusals_name_function_and_remedy():
    with pytest.raises(DataError, match=r"trl_with_ids.* needs the columns \['completion_ids'\]"):
        LoadedFunction(trl_with_ids, "trl_with_ids", {}).signature.check_columns({"is_end"})
    with pytest.raises(DataError, match=r"verl.* needs the columns \['extra_info'\]"):
        LoadedFunction(verl, "verl", {}).signature.check_columns({"data_source"})
    with pytest.raises(ConfigError, match=r"reward.kwargs contains \['bonus'\].*verl"):
        LoadedFunction(verl, "verl", {"bonus": 1})
    with pytest.raises(ConfigError, match="must take"):
        LoadedFunction(lambda completion: [1.0], "f", {})
    columns = {"data_source": ["m", "n"], "extra_info": [{}, {}]}
    samples = Samples(["a", "b"], ["x", "y"], TRUTHS, columns)
    assert dict(LoadedFunction(verl, "verl", {}).answers(samples))["culprit"] == 1

    def of_a_batch(solution_str, ground_truth):
        return [1.0] * len(solution_str)

    with pytest.raises(RewardError, match="returned a list"):
        scored(of_a_batch)
