"""Chats as training data: tokenizers that prepend a space, templates that open an answer, tools.

Every sequence that is learned is the one that a model is asked with: prompts of rollouts, SFT, DPO,
KTO and reward models agree token by token.
"""

import json

import pytest
from loaded import learned_texts, load_rows, load_set, write_rows
from tokenizers import AddedToken, decoders, models, normalizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from aligner.data.preferences import LabelledDataset, PairDataset, RatedDataset
from aligner.data.prompts import PromptDataset
from aligner.data.supervised import ExampleDataset, encode_chat, encode_pair
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import tokenizer_from_files
from aligner.errors import DataError
from aligner.rewards.sequences import SequenceEncoder

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + "
    "' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = LLAMA2.replace("' ' + m.content + ' ' + eos_token", "m.content + eos_token")
QUESTION = {"role": "user", "content": "two and two"}
CHAT = [
    QUESTION,
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and one"},
    {"role": "assistant", "content": "five more"},
]


def prepending(template):
    """A BPE whose normaliser begins every piece of text with a space, as Llama 2's does."""
    backend = RustTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = ["[INST] two and two [/INST] four and one five more ab ab abab"] * 20
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"])
    # Words apart, or the whole line would become one token.
    backend.train_from_iterator([word for line in words for word in line.split()], trainer)
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in ("<s>", "</s>")])
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    files = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    return tokenizer_from_files(files)


@pytest.fixture(scope="module", params=[LLAMA2, MISTRAL], ids=["llama2", "mistral"])
def tokenizer(request):
    return prepending(request.param)


def byte_level_files(**config):
    """The files of the byte-level tokenizer, with other values in its configuration."""
    files = byte_level_tokenizer().files()
    merged = json.loads(files["tokenizer_config.json"]) | config
    return files | {"tokenizer_config.json": json.dumps(merged).encode()}


def chatml(template, **config):
    """The byte-level tokenizer with another template."""
    return tokenizer_from_files(byte_level_files(chat_template=template, **config))


def test_all_kinds_of_data_hold_the_sequence_that_a_model_is_asked_with(tokenizer, tmp_path):
    row = {"prompt": [QUESTION], "response": "four", "chosen": "four", "rejected": "five"}
    others = {"label": True, "good": 1.0, "ground_truth": "four"}
    second = {**row, **others, "prompt": CHAT[:3], "label": False}
    path = write_rows(tmp_path / "x.jsonl", [{**row, **others}, second])
    prompt = load_set(PromptDataset, path, tokenizer)[0]
    learned_from = [
        load_set(ExampleDataset, path, tokenizer)[0],
        load_set(PairDataset, path, tokenizer)[0].chosen,
        load_set(LabelledDataset, path, tokenizer)[0].example,
        load_set(RatedDataset, path, tokenizer, attribute_columns=("good",))[0].example,
    ]
    closed = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=False)
    for example in learned_from:
        assert example.ids == tokenizer.encode(closed)
        assert example.ids[: example.learned[0][0]] == prompt.ids
    text = closed[len(prompt.text) :].removesuffix("</s>")
    assert SequenceEncoder(tokenizer, 256).ids(prompt.text, text) == learned_from[0].ids


def test_every_answer_is_encoded_where_it_stands(tokenizer):
    assert len(tokenizer.encode("ab")) == 1  # where the response is not encoded whole
    ids, span = encode_pair(tokenizer, "a", "b")
    assert tokenizer.decode(ids[:-1]) == "ab"
    assert len(ids) == 3
    assert span == [(1, 3)]
    ids, spans = encode_chat(tokenizer, CHAT)
    whole = tokenizer.apply_chat_template(CHAT, add_generation_prompt=False)
    assert ids == tokenizer.encode(whole)
    for number, (start, end) in enumerate(spans):
        asked = tokenizer.apply_chat_template(CHAT[: 2 * number + 1])
        assert ids[:start] == tokenizer.encode(asked)  # what a rollout's prompt would be
        assert ids[end - 1] == tokenizer.eos_id


R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}{% else %}"
    "{% set text = m.content %}{% if '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<A>' + text + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<A><think>\\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"content": "hm\n</think>\n\n4"}, "hm\n</think>\n\n4"),
        ({"content": "<think>\nhm\n</think>\n\n4"}, "hm\n</think>\n\n4"),
        ({"content": "4", "reasoning_content": "hm"}, "hm\n</think>\n\n4"),
        ({"content": "4"}, "\n</think>\n\n4"),
    ],
)
def test_an_answer_is_learned_behind_the_tag_that_its_prompt_ends_with(answer, text, tmp_path):
    tokenizer = chatml(R1)
    chat = [QUESTION, {"role": "assistant", **answer}]
    rows = [{"messages": chat}, {"messages": CHAT[:2] + chat}]
    form = {"messages_column": "messages", "learn": "last"}
    alone, later = load_rows(ExampleDataset, tmp_path, rows, tokenizer, **form)
    asked = tokenizer.apply_chat_template([QUESTION])
    assert tokenizer.decode(alone.ids) == f"{asked}{text}<|im_end|>"
    assert learned_texts(tokenizer, alone) == [f"{text}<|im_end|>"]
    assert tokenizer.decode(later.ids) == f"<U>two and two<A>four<|im_end|>{asked}{text}<|im_end|>"
    assert learned_texts(tokenizer, later) == [f"{text}<|im_end|>"]
    # What a reward model is asked with about a sampled response.
    assert SequenceEncoder(tokenizer, 256).ids(asked, text) == alone.ids


def test_preferences_between_reasoned_answers_and_what_cannot_be_learned(tmp_path):
    tokenizer = chatml(R1)
    row = {"prompt": [QUESTION], "chosen": "hm</think>4", "rejected": "<think>\nno</think>5"}
    pair = load_rows(PairDataset, tmp_path, [row], tokenizer)[0]
    for example, text in ((pair.chosen, "hm</think>4"), (pair.rejected, "no</think>5")):
        assert learned_texts(tokenizer, example) == [f"{text}<|im_end|>"]
    with pytest.raises(DataError, match=r"message 1 is added\. Set data.learn=last"):
        encode_chat(chatml(R1), CHAT)
    opens_otherwise = R1.replace("<think>\\n", "Answer: ")
    with pytest.raises(DataError, match=r"prompt ends with .*Answer: .*plain-text prompts"):
        encode_chat(chatml(opens_otherwise), CHAT[:2], "last")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
WITH_TOOLS = (
    "{% if tools %}{{ 'TOOLS ' + (tools | tojson) + '\\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.reasoning_content %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name }}"
    "{{ call.function.arguments.x }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"x": 7}'}}
USE = [
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": None},
    {"role": "tool", "content": "14", "tool_call_id": "1", "name": "add"},
    {"role": "assistant", "content": "14!", "reasoning_content": "easy", "tool_calls": []},
]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
def test_tools_calls_and_reasoning_reach_the_template(tools, tmp_path):
    tokenizer = chatml(WITH_TOOLS)
    row = {"messages": USE, "prompt": USE[:3], "tools": tools, "ground_truth": 14}
    path = write_rows(tmp_path / "x.jsonl", [row])
    example = load_set(ExampleDataset, path, tokenizer, messages_column="messages")[0]
    assert tokenizer.decode(example.ids).startswith('TOOLS [{"type": "function"')
    assert learned_texts(tokenizer, example) == [
        "<call>add7<|im_end|>",
        "<think>easy</think>14!<|im_end|>",
    ]
    prompt = load_set(PromptDataset, path, tokenizer)[0]
    assert prompt.text.startswith("TOOLS [")
    assert prompt.text.endswith("<|im_start|>tool\n14<|im_end|>\n<|im_start|>assistant\n")
    without = load_set(PromptDataset, path, tokenizer, tools_column=None)[0]
    assert not without.text.startswith("TOOLS")
    assert prompt.columns["tools"] == tools  # the reward function's, too


def test_no_calls_are_the_same_as_none(tokenizer, tmp_path):
    """Of templates that show no calls."""
    rows = [{"messages": [*CHAT[:1], CHAT[1] | more]} for more in ({}, {"tool_calls": []})]
    plain, empty = load_rows(ExampleDataset, tmp_path, rows, tokenizer, messages_column="messages")
    assert plain.ids == empty.ids


CALLING_5 = {"role": "assistant", "tool_calls": [5]}


@pytest.mark.parametrize(
    ("chat", "further", "lost"),
    [
        (CHAT[:2], {"tools": TOOLS}, "ignores tools "),
        (USE[:2], {}, "ignores tool_calls"),
        ([QUESTION, {**CHAT[1], "reasoning_content": "hm"}], {}, "ignores reasoning_content"),
        ([*CHAT[:2], USE[2], CHAT[3]], {}, "ignores messages of role 'tool'"),
        (CHAT[:2], {"tools": 5}, "column 'tools' must be a list of functions"),
        (CHAT[:2], {"tools": "{"}, "column 'tools' is text that is not JSON"),
        ([{**QUESTION, "weight": 1}, CHAT[1]], {}, r"optionally tool_calls.*got .*'weight'"),
        ([QUESTION, CALLING_5], {}, "must be a function with a name"),
    ],
)
def test_what_a_template_makes_nothing_of_is_refused_by_name(chat, further, lost, tmp_path):
    plain = (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ '<|im_start|>' + m.role "
        "+ '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    rows, tokenizer = [{"messages": chat, **further}], chatml(plain)
    with pytest.raises(DataError, match=rf"x.jsonl, line 1: .*{lost}"):
        load_rows(ExampleDataset, tmp_path, rows, tokenizer, messages_column="messages")


def test_preferences_in_every_public_form(tmp_path):
    chosen, rejected = ({"role": "assistant", "content": text} for text in ("four", "five"))
    plain = {"prompt": "two and two", "chosen": "four", "rejected": "five"}
    text = load_rows(PairDataset, tmp_path, [plain], chat=True)[0]
    both = {"chosen": [QUESTION, chosen], "rejected": [QUESTION, rejected]}
    rows = [
        {"prompt": [QUESTION], "chosen": [chosen], "rejected": [rejected]},
        {"prompt": "two and two", "chosen": [chosen], "rejected": [rejected]},
        both,
        {"prompt": "two and two", **both},
        {"prompt": [QUESTION], **both},
        {"prompt": [QUESTION], "chosen": "four", "rejected": "five"},
    ]
    for pair in load_rows(PairDataset, tmp_path, rows):
        assert (pair.chosen.ids, pair.chosen.learned) == (text.chosen.ids, text.chosen.learned)
        assert pair.rejected.ids == text.rejected.ids
    rows = [
        {"prompt": [QUESTION], "response": [chosen], "label": True},
        {"prompt": "and one", "response": [rejected], "label": False},
    ]
    assert load_rows(ExampleDataset, tmp_path, rows)[0].ids == text.chosen.ids
    assert load_rows(LabelledDataset, tmp_path, rows)[0].example.ids == text.chosen.ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rejected": CHAT[:4]}, "'chosen' and 'rejected' differ before their last message"),
        ({"prompt": "three"}, "without a user message of column 'prompt'"),
        ({"prompt": CHAT[2:3]}, "does not begin with the messages of column 'prompt'"),
        ({"chosen": CHAT[1:2]}, "so column 'prompt' must contain the prompt"),
        ({"chosen": CHAT[:1]}, "End with the assistant's answer"),
        ({"chosen": []}, "the list of chat messages is empty"),
        ({"chosen": 5}, "'chosen' must be text or a list of chat messages, got int"),
        ({"rejected": None}, "'rejected' is null. Name another column with data.rejected_column"),
    ],
)
def test_preferences_that_do_not_fit_are_refused(changes, message, tmp_path):
    row = {"chosen": CHAT[:2], "rejected": [QUESTION, {"role": "assistant", "content": "5"}]}
    with pytest.raises(DataError, match=rf"line 1: .*{message}"):
        load_rows(PairDataset, tmp_path, [{**row, **changes}])


def test_half_a_character_in_the_arguments_of_a_call_is_refused(tmp_path):
    """The row holds text of JSON, in which only a rendering finds it."""
    template = "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}"
    template += "{{ c.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}"
    call = {"name": "f", "arguments": '{"a": "\\ud800"}'}
    row = {"prompt": "a", "response": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    with pytest.raises(DataError, match=r"line 1: the chat template refuses .*surrogates"):
        load_rows(ExampleDataset, tmp_path, [row], chatml(template))


def test_tools_of_a_row_without_place_for_them_are_refused(tmp_path):
    row = {"prompt": "a", "response": "b", "tools": [{"name": "f"}]}
    with pytest.raises(DataError, match=r"'tools' contains tools, .*data\.tools_column=null"):
        load_rows(ExampleDataset, tmp_path, [row])
    load_rows(ExampleDataset, tmp_path, [row], tools_column=None)
    load_rows(ExampleDataset, tmp_path, [{**row, "tools": None}])
