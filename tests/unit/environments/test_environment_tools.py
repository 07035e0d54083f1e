"""Tools: schemas as in transformers, calls as models write them, the calculator, the games."""

import json
from typing import Literal

import pytest
from played import say
from test_chat_data import chatml
from transformers.utils import get_json_schema

from aligner.data.chat import parse_conversation
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.environments.calls import ToolCall, before_calls, form_of, parse_calls, structured
from aligner.environments.tools import json_schema
from aligner.environments.worker import load_factory
from aligner.errors import ConfigError
from aligner.examples.tasks.calculator import Calculation, calculation_traces, calculator
from aligner.examples.tasks.games import GuessingGame, guessing_games


def search(
    query: str, mass: float, table: dict, tags: list[str], top: int = 3, exact: bool | None = None
) -> str:
    """Look something up.

    In a corpus.

    Args:
        query: What to look for,
            in words.
        mass: In kilograms.
        table: Anything.
        top: Most results.
        exact: Only exact ones.
        tags: Of the documents.

    Returns:
        The results.
    """
    return query * top


def test_schemas_are_those_of_transformers_with_choices_and_descriptions():
    for function in (calculator, search):
        ours, theirs = json_schema(function), get_json_schema(function)
        theirs["function"].pop("return", None)
        assert ours == theirs

    def pick(colour: Literal["red", "blue"]) -> str:
        """Pick.

        Args:
            colour: One.
        """
        return colour

    kind = json_schema(pick)["function"]["parameters"]["properties"]["colour"]
    assert kind == {"type": "string", "enum": ["red", "blue"], "description": "One."}

    def silent(x: int) -> int:
        return x

    def vague(x: int) -> int:
        """Do."""
        return x

    with pytest.raises(ConfigError, match="'silent' has no docstring"):
        json_schema(silent)
    with pytest.raises(ConfigError, match="'vague': parameter 'x' needs a type hint and a line"):
        json_schema(vague)


def test_the_calculator_computes_and_does_nothing_else():
    values = {"2*(3+4)": "14", "-7//2": "-4", "1/4": "0.25", "2**10 % 7": "2", "+3 - -3": "6"}
    assert {expression: calculator(expression) for expression in values} == values
    for wrong in ("__import__('os')", "9**9**9", "10**60", "(-8)**0.5", "'a'*3", "1;2", "1" * 201):
        with pytest.raises((ValueError, SyntaxError)):
            calculator(wrong)


def test_a_calculation_with_calls():
    env = Calculation(seed=0, prompt="6*7=", ground_truth="42", call_reward=0.1, a=6)
    assert env.init().tools == [json_schema(calculator)]
    call = '<tool_call>{"name": "%s", "arguments": {"expression": "6*7"}}</tool_call>'
    turn = env.step(say(call % "calculator" + call % "oracle"))
    assert [message["role"] for message in turn.messages] == ["tool", "tool"]
    assert turn.messages[0]["content"] == "42"
    assert "there is no tool 'oracle'; there are calculator" in turn.messages[1]["content"]
    assert (turn.done, turn.score) == (False, None)  # one of the calls failed
    made = "calculator(expression='6*7')"
    assert turn.info == {"calls": f"{made}\n{made.replace('calculator', 'oracle')}"}
    assert env.step(say(call % "calculator")).score == 0.1
    assert env.step(say("so it is 41")).reward == {"reward": 0.0, "accuracy": 0.0}
    assert env.step(say("so it is 42")).score == 1.0
    env = Calculation(seed=0, prompt="6*7=", ground_truth="42", form="plain")
    assert env.step(say("call calculator {")).info["calls"].startswith("calculator(): ")


def test_the_guessing_game():
    game = GuessingGame(seed=0, secret=5, guesses=4)
    assert game.init().messages[0]["content"] == "1-9?"
    low, contradiction, noise, right = (game.step(say(text)) for text in ("3", "2", "x", "5."))
    assert low.messages[0]["content"] == "higher"
    assert [turn.score for turn in (low, contradiction, noise, right)] == [0.1, 0, 0, 1]
    assert [turn.done for turn in (low, contradiction, noise, right)] == [False] * 3 + [True]
    assert right.parts == {"accuracy": 1.0}
    lost = GuessingGame(seed=0, secret=5, guesses=1)
    assert lost.step(say("4")).done
    chosen = {GuessingGame(seed=seed)._secret for seed in range(50)}
    assert chosen == set(range(1, 10))
    rows = list(guessing_games(size=20))
    assert rows == list(guessing_games(size=30))[:20]
    assert rows != list(guessing_games("validation", size=20))


# As Llama 3.1 and 3.2, Mistral and Qwen write them; what they get wrong goes back as text.
LLAMA = '{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}'
WEATHER = ToolCall("get_weather", {"city": "Rome", "days": 2})
HERMES = '<tool_call>\n{"name": "f", "arguments": "{}"}\n</tool_call>'
NO_CALL = "a call is a JSON object with name and arguments"
NO_OBJECT = "the arguments are no JSON object"
V3 = '[TOOL_CALLS] [{"name": "f", "arguments": {"x": [1]}, "id": "a1B2c3D4e"}'
V3_CALL = ToolCall("f", {"x": [1]}, id="a1B2c3D4e")


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("llama3", f"<|python_tag|>{LLAMA}", [WEATHER]),
        ("llama3", f"\n{LLAMA}; {LLAMA}", [WEATHER, WEATHER]),
        ("llama3", LLAMA.replace('{"name"', '{"type": "function", "name"'), [WEATHER]),
        ("llama3", LLAMA.replace("parameters", "arguments"), [WEATHER]),
        ("llama3", 'Say {"name": "get_weather"}?', []),
        ("mistral", V3.replace("[TOOL_CALLS] [", "[TOOL_CALLS]"), [V3_CALL]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": "{}"}]', [ToolCall("f", {})]),
        ("mistral", 'ok[TOOL_CALLS]f[ARGS]{"x": 1}', [ToolCall("f", {"x": 1})]),
        (
            *("mistral", '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]g[ARGS]{"y": 2}'),
            [ToolCall("f", {}, id="a1B2c3D4e"), ToolCall("g", {"y": 2})],
        ),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}', [ToolCall("f", {})]),
        (
            *("hermes", f"I do: {HERMES} and\n{HERMES}<tool_call>no</tool_call>"),
            [ToolCall("f", {}), ToolCall("f", {}), ToolCall("", {}, NO_CALL)],
        ),
        (
            *("plain", 'well\ncall f {"x": 1}\ncall g\ncall h [1]'),
            [ToolCall("f", {"x": 1}), ToolCall("g", {}), ToolCall("h", {}, NO_OBJECT)],
        ),
        ("plain", "no call f", []),
    ],
)
def test_calls_as_models_write_them(form, text, calls):
    assert parse_calls(text, form) == calls


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("llama3", LLAMA[:-2], "JSON object with name and parameters"),
        ("llama3", '<|python_tag|>get_weather.call(city="Rome")', "with name and parameters"),
        ("llama3", '{"name": "f", "parameters": [1]}', "the arguments are no JSON object"),
        ("llama3", "<|python_tag|>", "JSON object with name and parameters"),
        ("mistral", "[TOOL_CALLS] []", "with name and arguments, in a list"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{x}", "the arguments are no JSON"),
        ("hermes", '<tool_call>\n{"name": "f", "argum', "JSON object with name and arguments"),
        ("hermes", f"<tool_call>{'[' * 100_000}", "JSON object with name and arguments"),
    ],
)
def test_what_is_no_call_goes_back_as_text(form, text, problem):
    env = Calculation(seed=0, prompt="6*7=", ground_truth="42", form=form)
    (message,) = env.step(say(text)).messages
    assert message["role"] == "tool"
    assert message["content"].startswith("error: ")
    assert problem in message["content"]


def test_results_of_calls_are_known_by_their_ids():
    env = Calculation(seed=0, prompt="6*7=", ground_truth="42", form="mistral")
    call = '{"name": "calculator", "arguments": {"expression": "%s"}%s}'
    given = ', "id": "a1B2c3D4e"'
    each = [call % (1, given), call % (2, given), call % (3, ', "id": "short"'), call % (4, "")]
    messages = env.step(say(f"[TOOL_CALLS] [{', '.join(each)}]")).messages
    assert [message["content"] for message in messages] == ["1", "2", "3", "4"]
    ids = [message["tool_call_id"] for message in messages]
    assert ids == ["a1B2c3D4e", "call00000", "call00001", "call00002"]


def test_text_and_calls_stand_apart():
    for form, calls in (
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}]'),
        ("llama3", '<|python_tag|>{"name": "f"}'),
        ("plain", "call f {}"),
    ):
        assert before_calls(f"well\n{calls}", form) == "well\n"
        assert before_calls("no call at all", form) == "no call at all"
    assert before_calls('{"name": "f"}', "llama3") == ""
    text = 'well[TOOL_CALLS]f[ARGS]{"x": 1}'
    results = [{"role": "tool", "content": one, "tool_call_id": one * 9} for one in "ab"]
    chat = [{"role": "user", "content": "q"}, say(text), *results, say("no [TOOL_CALLS]")]
    found = structured(chat, "mistral")
    assert [found[0], *found[2:]] == [chat[0], *chat[2:]]
    made = [(one["id"], one["function"]["name"]) for one in found[1]["tool_calls"]]
    assert made == [("a" * 9, "f"), ("b" * 9, "unknown")]


def test_a_class_is_given_the_form_of_the_template():
    name = "aligner.examples.tasks.calculator:Calculation"
    row = {"seed": 0, "prompt": "1+1=", "ground_truth": "2"}
    columns = ["prompt", "ground_truth"]
    assert load_factory(name, {}, columns, "plain")(**row).init().tools is None
    llama3 = {"form": "llama3"}
    assert load_factory(name, llama3, columns, "plain")(**row, **llama3).init().tools
    other = load_factory("user_environments:Echo", {}, ["name"], "plain")
    assert "form" not in other(seed=0).columns  # it is no ToolEnv
    said = "form='xml' is not one of hermes, llama3, mistral, plain"
    with pytest.raises(ConfigError, match=said):
        Calculation(**row, form="xml")
    assert form_of(byte_level_tokenizer()) == "plain"
    assert form_of(chatml(None)) == "plain"


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
