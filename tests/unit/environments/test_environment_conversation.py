"""Tokens of conversations: the prompt of a turn is the exact history and the new messages."""

import json
from functools import partial

import pytest
from test_chat_data import LLAMA2, MISTRAL, R1, chatml, prepending

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import tokenizer_from_files
from aligner.data.tokenizers.tokenizer import encode_fragment
from aligner.environments.conversation import ChatRenderer, Conversation
from aligner.environments.protocol import Start, Turn
from aligner.environments.tools import HOW_TO_CALL
from aligner.errors import DataError
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
