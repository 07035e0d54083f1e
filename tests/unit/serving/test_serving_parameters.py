"""Fields of a request change the answer as documented, or are refused by their name.

`tests/unit/algorithms/test_serving.py` has the other fields.
"""

import json
from contextlib import ExitStack

import httpx
import pytest
from test_serving import (
    CHAT,
    TEXT,
    TOKENIZER,
    USER,
    ask,
    refused,
    served,  # noqa: F401 - a fixture
)

from aligner.algorithms.ask.serve import start_server
from aligner.config import ServeConfig, parse_config
from aligner.errors import DataError
from aligner.serving.requests import _NEUTRAL as NEUTRAL
from aligner.serving.requests import ChatRequest, CompletionRequest, read_request

pytestmark = pytest.mark.integration

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


class Asked:
    """Ask one path of the server; every method returns what a client reads."""

    def __init__(self, server, path):
        self.server, self.path = server, path
        self.prompt = {"messages": USER} if path == CHAT else {"prompt": "hello"}

    def body(self, more):
        return {**self.prompt, "seed": 4, "max_tokens": 20, "return_token_ids": True, **more}

    def answer(self, **more):
        body = {key: value for key, value in self.body(more).items() if value is not None}
        return ask(self.server, self.path, **body)

    def choices(self, **more):
        return self.answer(**more)["choices"]

    def ids(self, **more):
        return [choice["token_ids"] for choice in self.choices(**more)]

    def is_refused(self, name, **more):
        _, error = refused(self.server, self.path, json.dumps(self.body(more)))
        assert error["message"].startswith(name), error
        return True

    def prompt_ids(self, **more):
        answer = self.answer(**more)
        return (answer if self.path == CHAT else answer["choices"][0])["prompt_token_ids"]


def check_n(asked):
    first, second, third = asked.ids(n=3)
    assert first == asked.ids()[0]
    assert len({tuple(first), tuple(second), tuple(third)}) == 3


def check_max_tokens(asked):
    (whole,) = asked.ids()
    assert len(whole) > 3
    assert asked.ids(max_tokens=3) == [whole[:3]]


def check_max_completion_tokens(asked):
    (whole,) = asked.ids()
    assert asked.ids(max_completion_tokens=2, max_tokens=9) == [whole[:2]]


def check_min_tokens(asked):
    lengths = [len(ids) for ids in asked.ids(n=60, max_tokens=40)]
    assert min(lengths) < 40
    assert {len(ids) for ids in asked.ids(n=60, max_tokens=40, min_tokens=40)} == {40}


def check_temperature(asked):
    assert asked.ids(temperature=0, n=2)[0] == asked.ids(temperature=0, seed=9)[0]
    assert asked.ids(temperature=0.001) == asked.ids(temperature=0)
    assert asked.ids(temperature=5) != asked.ids()


def check_top_p(asked):
    assert asked.ids(top_p=1e-6) == asked.ids(temperature=0)


def check_top_k(asked):
    assert asked.ids(top_k=1) == asked.ids(temperature=0)
    assert asked.ids(top_k=-1) == asked.ids(top_k=0) == asked.ids()


def check_repetition_penalty(asked):
    (ids,) = asked.ids(temperature=0, repetition_penalty=100, min_tokens=20)
    assert len(set(ids)) == len(ids) == 20
    (ids,) = asked.ids(temperature=0, repetition_penalty=0.01, min_tokens=20)
    assert len(set(ids)) < 20


def check_skip_special_tokens(asked):
    spelt = 0
    for skips in (False, True):
        for choice in asked.choices(n=40, max_tokens=40, skip_special_tokens=skips):
            ids = [token for token in choice["token_ids"] if token not in TOKENIZER.end_ids]
            spelt += any(token in TOKENIZER.special_ids for token in ids)
            shown = [token for token in ids if not skips or token not in TOKENIZER.special_ids]
            text = choice["message"]["content"] if asked.path == CHAT else choice["text"]
            assert text == TOKENIZER.decode(shown)
    assert spelt > 2


def check_model(asked):
    assert asked.answer(model="tiny")["model"] == "tiny"
    assert asked.is_refused("model", model="another")


def check_tools(asked):
    shown = TOKENIZER.decode(asked.prompt_ids(tools=[TOOL]))
    assert "now" in shown
    assert "now" not in TOKENIZER.decode(asked.prompt_ids())


def check_tool_choice(asked):
    assert asked.prompt_ids(tools=[TOOL], tool_choice="none") == asked.prompt_ids()
    assert asked.prompt_ids(tools=[TOOL], tool_choice="auto") != asked.prompt_ids()
    assert asked.is_refused("tool_choice", tools=[TOOL], tool_choice="required")


def check_chat_template_kwargs(asked):
    # Templates that read a variable: tests/unit/data/test_template_variables.py.
    assert asked.is_refused("chat_template_kwargs", chat_template_kwargs={"tokenize": True})
    assert asked.is_refused("chat_template_kwargs", chat_template_kwargs={"never_read": True})


HONOURED = {
    name.removeprefix("check_"): check
    for name, check in dict(globals()).items()
    if name.startswith("check_")
}
FIELDS = [
    (path, field)
    for path, model in ((CHAT, ChatRequest), (TEXT, CompletionRequest))
    for field in model.model_fields.keys() & HONOURED.keys()
]


@pytest.mark.parametrize(("path", "field"), sorted(FIELDS))
def test_a_field_is_honoured_or_refused_by_name(served, path, field):  # noqa: F811
    HONOURED[field](Asked(served, path))


@pytest.mark.parametrize("key", sorted(NEUTRAL))
def test_a_key_that_is_not_offered_is_refused_by_name_unless_it_changes_nothing(key):
    messages = {"messages": USER}
    for value in NEUTRAL[key]:
        read_request(ChatRequest, json.dumps({**messages, key: value}).encode())
    with pytest.raises(DataError, match=f"^{key}: 'another value' is not supported"):
        read_request(ChatRequest, json.dumps({**messages, key: "another value"}).encode())


@pytest.mark.parametrize(("key", "value"), [("best_of", True), ("echo", 0)])
def test_a_truth_value_is_no_number_and_a_number_no_truth_value(key, value):
    with pytest.raises(DataError, match=f"^{key}: {value} is not supported"):
        read_request(CompletionRequest, json.dumps({"prompt": "a", key: value}).encode())


def test_a_model_of_256_positions_is_served_by_default(tiny_nemo, tmp_path):
    model = {"restore_from_path": str(tiny_nemo)}
    server = {"port": 0, "token_file": str(tmp_path / "token")}
    config = parse_config({"model": model, "server": server}, ServeConfig)
    assert config.sampling.max_length == 256
    said = []
    with ExitStack() as closing:
        start_server(config, closing, said.append)
        address = said[-1].split()[2].removesuffix("/v1")
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert "sampling.max_length=255: more does not fit the model" in said
