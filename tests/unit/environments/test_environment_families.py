"""Conversations with tools, family by family, against an oracle that knows no template.

Every token of a conversation, and whether the policy sampled it, is what `chat_families.Family`
says by hand; nothing of the renderer is asked.
"""

import random

import pytest
from chat_families import FAMILIES

from aligner.data.chat import check_all_used, parse_conversation
from aligner.data.supervised import encode_chat
from aligner.environments.calls import FORMS, form_of, parse_calls
from aligner.environments.conversation import ChatRenderer, Conversation
from aligner.environments.protocol import Start, Turn
from aligner.environments.tools import json_schema
from aligner.examples.tasks.calculator import calculator

WORDS = ["two", "and", "four", "ab", "é", "7+", "a\nb", '"q"']
TOOLS = [json_schema(calculator)]


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.extended)])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_conversations_with_tools(family, count):
    kind = FAMILIES[family]
    renderer = ChatRenderer(kind.make(), rewritten_history="refuse")
    assert form_of(renderer.tokenizer) == kind.form
    rng = random.Random(f"{family} {count}")
    called = sum(_check(kind, renderer, rng) for _ in range(count))
    assert called > count / 2


def _words(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))


def _calls(rng):
    names = [f"{rng.choice('abcXYZ')}{number:08d}" for number in range(rng.randint(1, 3))]
    return [("calculator", {"expression": _words(rng)}, one) for one in names]


def _check(kind, renderer, rng):
    """One conversation; how many calls it had."""
    tokenizer = renderer.tokenizer
    tools = TOOLS if rng.random() < 0.7 else None
    question, made = _words(rng), 0
    parts = [(kind.first(question, tools) + kind.opens, False)]  # text, sampled
    talk = Conversation(renderer, Start([{"role": "user", "content": question}], tools))
    for _ in range(rng.randint(1, 4)):
        before = list(talk.ids)
        # Mistral's template moves the functions to the last message of a user.
        calls = _calls(rng) if tools and (kind.form == "mistral" or rng.random() < 0.6) else []
        text = kind.calls(calls) if calls else _words(rng)
        end = rng.choice(kind.ends) if rng.random() < 0.7 else ""
        sampled = tokenizer.encode(text + end)
        message = talk.answered(sampled, [-1.0] * len(sampled), bool(end))
        assert message["content"] == text
        found = parse_calls(message["content"], kind.form)
        assert [(one.name, one.arguments) for one in found] == [call[:2] for call in calls]
        results = [str(rng.randint(0, 99)) for _ in calls]
        if calls:
            new = FORMS[kind.form].results(found, results)
            shown = kind.results(new)
        else:
            new = [{"role": "user", "content": _words(rng)}]
            shown = kind.user(new[0]["content"])
        talk.follow(Turn(new, 1.0), goes_on=True)
        parts += [(text + end, True), ((kind.rest if end else kind.closing), False)]
        parts += [(shown + kind.opens, False)]
        made += len(calls)
        assert talk.ids[: len(before) + len(sampled)] == before + sampled
    assert talk.starts == [0]
    assert tokenizer.decode(talk.ids) == "".join(text for text, _ in parts)
    mask = [by for text, by in parts for _ in tokenizer.encode(text)]
    assert [turn > 0 for turn in talk.turn_ids] == mask
    assert talk.ids == [token for text, _ in parts for token in tokenizer.encode(text)]
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_supervised_chats_learn_calls_as_the_policy_writes_them(family):
    kind = FAMILIES[family]
    tokenizer = kind.make()
    function = {"name": "calculator", "arguments": '{"expression": "7"}'}
    chat = parse_conversation(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{"id": "a1B2c3D4e", "function": function}]},
            {"role": "tool", "content": "14", "tool_call_id": "a1B2c3D4e"},
            {"role": "assistant", "content": "14!"},
        ]
    )
    check_all_used(tokenizer, chat, TOOLS)
    ids, spans = encode_chat(tokenizer, chat, tools=TOOLS)
    call, answer = (tokenizer.decode(ids[start:end]).strip() for start, end in spans)
    written = kind.calls([("calculator", {"expression": "7"}, "a1B2c3D4e")])
    assert (call.replace("\n", ""), answer) == (
        (written + kind.ends[0]).replace("\n", ""),
        f"14!{kind.ends[0]}",
    )
