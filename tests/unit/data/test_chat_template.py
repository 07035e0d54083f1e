"""A chat template of one's own, by key: what it changes, and what is refused before a model."""

import pytest
from test_chat_data import chatml, prepending

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import tokenizer_from_files, with_chat_template
from aligner.environments.conversation import ChatRenderer, Conversation
from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError

KEY = "environment.chat_template"
OWN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(OWN)
    return path


def test_conversations_are_shown_by_it_and_the_model_keeps_it(own):
    tokenizer = with_chat_template(byte_level_tokenizer(), own, key=KEY)
    assert tokenizer.end_ids == (258, 256)  # an answer ends where the template ends it
    talk = Conversation(ChatRenderer(tokenizer), Start([{"role": "user", "content": "hi"}]))
    talk.answered([ord("4"), 256], [-1.0, -1.0], True)
    talk.follow(Turn([{"role": "user", "content": "no"}]), goes_on=True)
    shown = "user: hi<|endoftext|>assistant: 4<|endoftext|>user: no<|endoftext|>assistant: "
    assert tokenizer.decode(talk.ids) == shown
    again = tokenizer_from_files(tokenizer.files())
    assert again.apply_chat_template([{"role": "user", "content": "a"}]).startswith("user: a")


def test_a_tokenizer_without_a_template_gets_one(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(OWN.replace("<|endoftext|>", "</s>"))
    tokenizer = with_chat_template(prepending(None), path, key=KEY)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]).startswith("user: ab")
    assert tokenizer.turn_end_id == tokenizer.eos_id


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", "refuses the messages.*correct the template"),
        ("{{ raise_exception('never') }}", "never; correct the template"),
        ("{{ messages[1].content }}", "omits the message of the user"),
        ("{{ messages[0].content }}", "omits the message of the assistant"),
        (b"\xff\xfe\x00", "cannot be read as text"),
        (None, "cannot be read as text.*No such file"),
    ],
)
def test_what_is_no_template_is_refused(template, said, tmp_path):
    path = tmp_path / "own.jinja"
    if template is not None:
        path.write_bytes(template if isinstance(template, bytes) else template.encode())
    with pytest.raises(ConfigError, match=rf"^{KEY}=.*own.jinja: .*{said}"):
        with_chat_template(byte_level_tokenizer(), path, key=KEY)


@pytest.mark.parametrize(
    ("change", "where"),
    [("upper", ""), ("capitalize", "and not loop.last"), ("replace('n', 'm')", "")],
)
def test_a_template_that_changes_the_assistants_messages_is_refused_at_the_start(change, where):
    changed = f"(m.content | {change} if m.role == 'assistant' {where} else m.content)"
    tokenizer = chatml("<|im_start|>" + OWN.replace("m.content", changed))
    with pytest.raises(ConfigError, match=rf"An answer⁂': .*Set {KEY}=FILE.jinja"):
        ChatRenderer(tokenizer)
    assert tokenizer.encode("<|im_start|>")[0] not in tokenizer.end_ids
