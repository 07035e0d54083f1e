"""Traces of conversations with a calculator: what the environment itself would have said."""

import json

import pytest

from aligner.data.chat import parse_conversation
from aligner.environments.tools import json_schema
from aligner.errors import ConfigError
from aligner.examples.tasks.calculator import Calculation, calculation_traces, calculator

ASKED = {"size": 200, "low": 100, "high": 120, "operators": ["*"], "shots": 0}


@pytest.mark.parametrize("form", ["plain", "hermes"])
def test_a_trace_is_what_the_environment_says(form):
    rows = list(calculation_traces(form=form, tool_share=1.0, **ASKED))
    for row in rows[:5]:
        question, call, result, answer = parse_conversation(row["messages"])
        prompt = question["content"].splitlines()[-1]
        env = Calculation(seed=0, prompt=prompt, ground_truth=answer["content"], form=form)
        assert env.init().messages == [question]
        (said,) = env.step(call).messages
        assert said == result
        assert answer["content"] in result["content"]
        assert env.step(answer).score == 1.0
        assert row.get("tools") == (None if form == "plain" else [json_schema(calculator)])


def test_the_tool_is_called_in_a_share_of_them():
    rows = list(calculation_traces(tool_share=0.25, **ASKED))
    calls = sum(len(row["messages"]) == 4 for row in rows)
    assert all(len(row["messages"]) in (2, 4) for row in rows)
    assert 0.15 < calls / len(rows) < 0.35
    again = list(calculation_traces(tool_share=0.25, **{**ASKED, "size": 10}))
    assert json.dumps(again) == json.dumps(rows[:10])
    with pytest.raises(ConfigError, match=r"tool_share=1\.5"):
        next(calculation_traces(tool_share=1.5))
