"""Chat templates: rendered as by transformers, with its variables and those of the settings."""

import json
import pickle
from datetime import datetime

import pytest
from test_chat_data import byte_level_files, chatml, prepending
from transformers import AutoTokenizer

from aligner.algorithms.ask.generate import generate
from aligner.algorithms.run.startup import describe_model_of
from aligner.checkpoint.convert import convert
from aligner.config import GenerateConfig, SFTRunConfig, parse_config
from aligner.data.chat import render
from aligner.data.readers import DataRow
from aligner.data.supervised import make_example
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import (
    load_tokenizer,
    tokenizer_from_files,
    with_chat_template,
    with_template_kwargs,
)
from aligner.data.tokenizers.tokenizer import fixed_time
from aligner.environments.calls import form_of
from aligner.environments.conversation import ChatRenderer, Conversation
from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError, DataError

CHAT = [{"role": "user", "content": "hi"}]
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image")
TEMPLATE = (
    "".join(f"{{{{ '{n}' + ({n}_token | default('-') | string) }}}}" for n in NAMES)
    + "{{ strftime_now('%d %b %Y') }}{{ additional_special_tokens | default('-') | string }}"
    "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}"
    "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<no>' }}{% endif %}{% endif %}"
)


def files(template=TEMPLATE, **config):
    return byte_level_files(chat_template=template, **config)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"sep_token": "<|im_end|>", "cls_token": None, "mask_token": "<|endoftext|>"},
        {"pad_token": None, "bos_token": None, "unk_token": None},
        {"extra_special_tokens": {"image_token": "<|im_end|>"}},
        {"extra_special_tokens": ["<|im_end|>"]},
        {"additional_special_tokens": ["<|im_end|>"]},
        {"image_token": "<|im_end|>"},
    ],
    ids=["few", "more", "none", "by name", "a list", "additional", "at the top"],
)
def test_variables_are_those_of_transformers(tmp_path, config):
    for name, content in files(**config).items():
        (tmp_path / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizer_from_files(files(**config))
    again = tokenizer_from_files(ours.files())
    for kwargs in (
        {},
        {"enable_thinking": False},
        {"documents": [{"title": "T"}], "bos_token": "B"},
    ):
        options = {"tokenize": False, "add_generation_prompt": True, **kwargs}
        expected = theirs.apply_chat_template(CHAT, **options)
        for tokenizer in (ours, again):
            found = pickle.loads(pickle.dumps(tokenizer.with_template_kwargs(kwargs)))
            assert found.apply_chat_template(CHAT) == expected
        assert datetime.now().strftime("%d %b %Y") in expected
    with fixed_time("2001-02-03T04:05:06"):
        assert "03 Feb 2001" in ours.apply_chat_template(CHAT)


PLAIN = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
TOOLS = (
    "{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) }}{% endfor %}"
    "{% endfor %}"
)
TOOL = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
NAMED = [{"name": "tool_use", "template": TOOLS}, {"name": "default", "template": PLAIN}]


@pytest.mark.parametrize(
    ("template", "more"),
    [
        (NAMED, {}),
        (None, {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": TOOLS}),
        ("wrong", {"chat_template.jinja": PLAIN}),
        (None, {"chat_template.jinja": "\ufeff" + PLAIN}),
    ],
    ids=["list", "folder", "file first", "byte-order mark"],
)
def test_several_templates_are_rendered_as_by_transformers(tmp_path, template, more):
    contents = {name: text.encode() for name, text in more.items()}
    for name, content in (files(template) | contents).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    if "tool_use" in json.dumps([template, list(more)]):
        assert form_of(ours) == "hermes"  # functions are left to the template
    for tools in (None, TOOL):
        options = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
        expected = theirs.apply_chat_template(CHAT, **options).removeprefix("\ufeff")
        for tokenizer in (ours, tokenizer_from_files(ours.files())):
            assert tokenizer.apply_chat_template(CHAT, tools=tools) == expected


def test_what_is_no_variable_is_refused():
    tokenizer = tokenizer_from_files(files())
    for name in ("tools", "messages", "chat_template", "tokenize", "return_dict"):
        with pytest.raises(DataError, match=name):
            tokenizer.with_template_kwargs({name: True})
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs=.*does not read thinking"):
        with_template_kwargs(tokenizer, {"enable_thinking": False, "thinking": True})


@pytest.fixture(scope="module")
def model(tiny_nemo, tmp_path_factory):
    """The tiny model with `TEMPLATE`."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    convert(tiny_nemo, folder)
    for name, content in files().items():
        (folder / name).write_bytes(content)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return {"restore_from_path": str(folder)}


def test_the_key_reaches_data_and_conversations(model):
    section = {"train": {"source": "rows.jsonl"}, "messages_column": "messages"}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    config = parse_config({"model": model, "data": section | kwargs}, SFTRunConfig)
    tokenizer, _ = describe_model_of(config)
    assert render(tokenizer, CHAT).endswith("assistant<no>")
    talk = Conversation(ChatRenderer(tokenizer), Start(CHAT))
    assert tokenizer.decode(talk.ids).endswith("assistant<no>")
    row = DataRow("row 1", {"prompt": "a", "response": "b"})
    del section["messages_column"]
    config = parse_config({"model": model, "data": section | kwargs}, SFTRunConfig)
    with pytest.raises(DataError, match=r"data\.chat_template_kwargs is set, but the row is plain"):
        make_example(row, 0, tokenizer, config.data)


@pytest.mark.integration
def test_prompts_of_commands_have_it(model, tmp_path):
    output = tmp_path / "answers"
    values = {"model": model, "prompt": ["hi"], "sampling": {"max_length": 2}}
    values |= {"output": str(output)}
    data = {"chat": True, "chat_template_kwargs": {"enable_thinking": False}}
    generate(parse_config({**values, "data": data}, GenerateConfig))
    assert json.loads(output.read_text())["prompt"].endswith("assistant<no>")


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
    with pytest.raises(ConfigError, match=rf"An answer⁂' as .*Set {KEY}=FILE.jinja"):
        ChatRenderer(tokenizer)
    assert tokenizer.encode("<|im_start|>")[0] not in tokenizer.end_ids
