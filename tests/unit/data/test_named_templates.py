"""Several chat templates, and the variables in them: the text that transformers renders."""

import json

import pytest
from transformers import AutoTokenizer

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import load_tokenizer, tokenizer_from_files
from aligner.environments.calls import form_of

PLAIN = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
TOOLS = (
    "{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) }}{% endfor %}"
    "{% endfor %}"
)
CHAT = [{"role": "user", "content": "hi"}]
TOOL = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
NAMED = [{"name": "tool_use", "template": TOOLS}, {"name": "default", "template": PLAIN}]
SPECIAL = "{{ bos_token }}{{ unk_token }}{{ sep_token }}{{ image_token }}" + PLAIN


@pytest.mark.parametrize("tools", [None, TOOL], ids=["chat", "tools"])
@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": NAMED}, {}),
        ({}, {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": TOOLS}),
        ({"chat_template": "wrong"}, {"chat_template.jinja": PLAIN}),
        ({}, {"chat_template.jinja": "\ufeff" + PLAIN}),
        (
            {"chat_template": SPECIAL, "sep_token": "<|im_end|>"}
            | {"extra_special_tokens": {"image_token": "<|im_start|>"}},
            {},
        ),
    ],
    ids=["list", "folder", "file first", "byte-order mark", "special tokens"],
)
def test_the_text_is_that_of_transformers(tmp_path, config, files, tools):
    for name, content in byte_level_tokenizer().files().items():
        (tmp_path / name).write_bytes(content)
    path = tmp_path / "tokenizer_config.json"
    base = json.loads(path.read_text())
    base.pop("chat_template")
    path.write_text(json.dumps(base | config))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    options = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
    expected = theirs.apply_chat_template(CHAT, **options).removeprefix("\ufeff")
    ours = load_tokenizer(tmp_path)
    if "tool_use" in json.dumps([config, list(files)]):
        assert form_of(ours) == "hermes"  # functions are left to the template
    assert ours.apply_chat_template(CHAT, tools=tools) == expected
    again = tokenizer_from_files(ours.files())
    assert again.apply_chat_template(CHAT, tools=tools) == expected
