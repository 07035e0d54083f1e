"""Tokens of conversations: the prompt of a turn is the exact history and the new messages.

Random conversations with tools, family by family, are compared with an oracle that knows no
template: every token of a conversation, and whether the policy sampled it, is what
`chat_families.Family` says by hand.
"""

import json
import random
from functools import partial

import pytest
from chat_families import FAMILIES
from test_chat_data import LLAMA2, MISTRAL, R1, chatml, prepending

from aligner.data.chat import check_all_used, parse_conversation
from aligner.data.supervised import encode_chat
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import tokenizer_from_files
from aligner.data.tokenizers.tokenizer import encode_fragment
from aligner.environments.calls import FORMS, form_of, parse_calls
from aligner.environments.conversation import ChatRenderer, Conversation
from aligner.environments.protocol import Start, Turn
from aligner.environments.tools import HOW_TO_CALL, json_schema
from aligner.errors import DataError
from aligner.examples.tasks.calculator import calculator
from aligner.serving.sessions import Session


def user(text):
    return {"role": "user", "content": text}


def test_without_a_template_a_message_is_a_line():
    tokenizer = chatml(None)
    talk = Conversation(ChatRenderer(tokenizer), Start([user("guess"), user("1-9")]))
    assert tokenizer.decode(talk.ids) == "guess\n1-9\n"
    talk.answered(tokenizer.encode("4\n"), [-1.0, -1.0], True)  # the stop string is the newline
    talk.follow(Turn([user("higher")]), goes_on=True)
    talk.answered(tokenizer.encode("5"), [-1.0], False)
    talk.follow(Turn([user("lower")]), goes_on=True)
    assert tokenizer.decode(talk.ids) == "guess\n1-9\n4\nhigher\n5\nlower\n"


PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [None, PLAIN], ids=["no template", "one without tools"])
def test_tools_that_no_template_shows_are_described_in_the_first_message(template):
    """With the syntax of a call, without which a policy cannot make one."""
    tokenizer = chatml(template)
    talk = Conversation(ChatRenderer(tokenizer), Start([user("a")], [{"name": "f"}]))
    assert f"call f {{}}: \n{HOW_TO_CALL}\na" in tokenizer.decode(talk.ids)


def test_history_that_a_template_rewrites_or_leaves_out():
    tokenizer = chatml(R1)
    thought = [*tokenizer.encode("hm</think>4"), 258]

    def after_a_turn(**options):
        talk = Conversation(ChatRenderer(tokenizer, **options), Start([user("q")]))
        talk.answered(thought, [-1.0] * len(thought), True)
        talk.follow(Turn([user("r")]), goes_on=True)
        return tokenizer.decode(talk.ids)

    with pytest.raises(DataError, match=r"rewrites earlier turns.*rewritten_history=fork"):
        after_a_turn(rewritten_history="refuse")
    question, answer = "<U>q<A><think>\n", "hm</think>4<|im_end|>"
    assert after_a_turn() == f"{question}{answer}<U>q<A>4<|im_end|><U>r<A><think>\n"
    kept = after_a_turn(rewritten_history="keep")
    assert kept == "<U>q<A><think>\nhm</think>4<|im_end|><U>r<A><think>\n"
    plain = R1.replace("{% else %}{% set", "{% elif m.role == 'assistant' %}{% set", 1)
    renderer = ChatRenderer(chatml(plain), rewritten_history="keep")
    talk = Conversation(renderer, Start([user("q")]))
    talk.answered([ord("4"), 258], [-1.0, -1.0], True)
    with pytest.raises(DataError, match="ignores messages of role 'tool'"):
        talk.follow(Turn([{"role": "tool", "content": "14"}]), goes_on=True)


def test_rewards_of_steps_stand_at_the_tokens_that_complete_them():
    """A step ends in a character of two bytes; the last one ends with the message."""
    tokenizer = byte_level_tokenizer()
    talk = Conversation(ChatRenderer(tokenizer), Start([user("q")]))
    for text, turn in (
        ("ab\ncé.", Turn([user("r")], 2.0, steps=[(3, 0.5), (5, -1.0), (6, 4.0)])),
        ("é", Turn(done=True, steps=[(1, 8.0)])),
    ):
        ids = [*tokenizer.encode(text), tokenizer.turn_end_id]
        message = talk.answered(ids, [-1.0] * len(ids), True)
        assert message["content"] == text
        talk.follow(turn, goes_on=not turn.done)
    sampled = [
        [reward for reward, number in zip(talk.rewards, talk.turn_ids, strict=False) if number == n]
        for n in (0, 1, 2)
    ]
    assert set(sampled[0]) == {0.0}
    assert sampled[1] == [0, 0, 0.5, 0, 0, -1.0, 4.0, 2.0]  # a b \n c é é . end
    assert sampled[2] == [0, 8.0, 0]
    assert len(talk.rewards) == talk.length
    # Half a character at the end is shown as one: its step is the last token's.
    talk = Conversation(ChatRenderer(tokenizer), Start([user("q")]))
    ids = tokenizer.encode("aé")[:2]
    message = talk.answered(ids, [-1.0] * 2, False)
    assert len(message["content"]) == 2
    talk.follow(Turn(done=True, steps=[(1, 1.0), (2, 3.0)]), goes_on=False)
    assert talk.rewards[-2:] == [1.0, 3.0]


TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.mark.parametrize(
    ("template", "behind"),
    [
        (None, "\nand one\n"),
        (TURNS, "\nuser: and one\nassistant:"),
        (LLAMA2, " </s><s>[INST] and one [/INST]"),
        (MISTRAL, "</s><s>[INST] and one [/INST]"),
    ],
    ids=["none", "turns", "llama2", "mistral"],
)
@pytest.mark.parametrize("ended", [False, True])
def test_no_token_is_added_between_turns(template, behind, ended):
    """The normaliser begins every text with a space; what follows a turn is no beginning."""
    tokenizer = prepending(template)
    talk = Conversation(ChatRenderer(tokenizer, rewritten_history="keep"), Start([user("two")]))
    answer = tokenizer.encode("four")
    ids = [*answer, tokenizer.eos_id] if ended else answer
    talk.answered(ids, [-1.0] * len(ids), ended)
    talk.follow(Turn([user("and one")]), goes_on=True)
    read = talk.ids[talk.prompt_length + len(ids) :]
    expected = tokenizer.encode("x" + behind)[len(tokenizer.encode("x")) :]
    if ended and tokenizer.eos_id in expected:  # what was sampled stands for it
        expected = expected[expected.index(tokenizer.eos_id) + 1 :]
    assert read == expected


def test_a_prompt_that_continues_a_session_has_no_token_added():
    tokenizer = prepending(None)
    session, asked = Session(), "two and two"
    prompt = session.encode(asked, tokenizer.encode, partial(encode_fragment, tokenizer))
    for answer in ([tokenizer.encode("xfour")[-1]], tokenizer.encode("abab")[:1] * 2):
        [request] = session.admit([prompt], 8, 1)
        text = tokenizer.decode(prompt + answer)[len(tokenizer.decode(prompt)) :]
        session.record(prompt, answer, [-1.0] * len(answer), "length", text, request)
        asked += f"{text}\nand one"
        known = session.sequences[-1].ids[:]
        prompt = session.encode(asked, tokenizer.encode, partial(encode_fragment, tokenizer))
        assert prompt[: len(known)] == known
        assert prompt[len(known) :] == tokenizer.encode("x\nand one")[len(tokenizer.encode("x")) :]
    assert len(session.sequences) == 1


def test_another_end_token_stays_and_the_templates_end_follows_it_masked():
    tokenizer = byte_level_tokenizer()
    files = tokenizer.files()
    other = tokenizer.encode("~")
    ends = json.dumps({"eos_token_id": [tokenizer.turn_end_id, *other]}).encode()
    tokenizer = tokenizer_from_files({**files, "generation_config.json": ends})
    talk = Conversation(ChatRenderer(tokenizer), Start([user("q")]))
    ids = [*tokenizer.encode("4"), *other]
    talk.answered(ids, [-1.0] * len(ids), True)
    talk.follow(Turn([user("r")]), goes_on=True)
    shown = tokenizer.decode(talk.sequence)
    assert shown.count("<|im_end|>") == 3
    assert "4~<|im_end|>\n<|im_start|>user\nr<|im_end|>" in shown
    assert sum(turn > 0 for turn in talk.turn_ids) == len(ids)
    assert talk.starts == [0]


def test_no_text_of_a_message_is_taken_for_an_answer():
    """Not the text by which the renderer finds the place behind an answer either."""
    tokenizer = byte_level_tokenizer()
    said = "more ⁂answer⁂ ⁂answer 0⁂ ⁂answer 1⁂ and more"
    talk = Conversation(ChatRenderer(tokenizer, rewritten_history="refuse"), Start([user(said)]))
    ids = [*tokenizer.encode("ok"), tokenizer.turn_end_id]
    for _ in range(2):
        talk.answered(ids, [-1.0] * len(ids), True)
        talk.follow(Turn([user(said)]), goes_on=True)
    assert talk.starts == [0]
    assert tokenizer.decode(talk.sequence).count(said) == 3


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
