"""Worked examples: what is learned is the response and its end, nothing else."""

import pytest
import torch
from loaded import learned_texts, load_rows
from test_chat_data import chatml

from aligner.data.supervised import ExampleDataset, collate_examples, encode_chat, response_note
from aligner.errors import ConfigError, DataError

CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "4+4?"},
    {"role": "assistant", "content": "8"},
]
SUM = {"prompt": "2+3=", "response": "5"}
END = "<|im_end|>"


def test_prompt_and_response(tmp_path, tokenizer):
    example = load_rows(ExampleDataset, tmp_path, [SUM])[0]
    assert example.ids == [*tokenizer.encode("2+3=5"), tokenizer.eos_id]
    assert example.learned == [(4, 6)]  # "5" and EOS
    example = load_rows(ExampleDataset, tmp_path, [SUM], add_bos=True)[0]
    assert example.ids[0] == tokenizer.bos_id
    assert example.learned == [(5, 7)]


def test_every_answer_of_a_chat(tmp_path, tokenizer):
    rows = [{"messages": CHAT}]
    example = load_rows(ExampleDataset, tmp_path, rows, messages_column="messages")[0]
    assert learned_texts(tokenizer, example) == [f"5{END}", f"8{END}"]
    assert example.ids[-1] == tokenizer.eos_id  # what the template puts behind it is cut off
    whole = tokenizer.apply_chat_template(CHAT, add_generation_prompt=False)
    assert whole.startswith(tokenizer.decode(example.ids))
    last = load_rows(ExampleDataset, tmp_path, rows, messages_column="messages", learn="last")[0]
    assert last.ids == example.ids
    assert learned_texts(tokenizer, last) == [f"8{END}"]


def test_every_answer_of_a_response_of_several_turns(tmp_path, tokenizer):
    chat = CHAT[1:]
    rows = [
        {"response": chat},
        {"prompt": "2+3?", "response": chat},
        {"prompt": chat[:1], "response": chat[1:]},
        {"prompt": chat[:1], "response": chat},
        {"prompt": chat[:3], "response": chat[3:]},
        {"prompt": chat[:3], "response": chat},
    ]
    texts = [learned_texts(tokenizer, each) for each in load_rows(ExampleDataset, tmp_path, rows)]
    assert texts == [[f"5{END}", f"8{END}"]] * 4 + [[f"8{END}"]] * 2
    rows = [{"prompt": chat[:1], "response": chat[1:]}]
    with_system = load_rows(ExampleDataset, tmp_path, rows, system_prompt="Add.")[0]
    assert learned_texts(tokenizer, with_system) == [f"5{END}", f"8{END}"]
    last = load_rows(ExampleDataset, tmp_path, rows, learn="last")[0]
    assert learned_texts(tokenizer, last) == [f"8{END}"]


@pytest.mark.parametrize("chat", [False, True])
def test_a_response_that_ends_with_the_end_token_gets_no_second_end(tmp_path, tokenizer, chat):
    rows = [{"prompt": "2+3=", "response": end} for end in ("5", f"5{END}")]
    plain, spelt = load_rows(ExampleDataset, tmp_path, rows, chat=chat)
    assert plain.ids == spelt.ids
    assert learned_texts(tokenizer, spelt) == [f"5{END}"]


def test_plain_text_that_spells_an_end_token_is_learned_whole_and_noted(tmp_path, tokenizer):
    example = load_rows(ExampleDataset, tmp_path, [{"prompt": "q", "response": f"a {END} b"}])[0]
    assert learned_texts(tokenizer, example) == [f"a {END} b{END}"]
    rows = [SUM, {"prompt": "44+4=", "response": "48"}]
    examples = load_rows(ExampleDataset, tmp_path, rows)
    note = response_note([examples[0], examples[1]], tokenizer)
    assert note.startswith("5 of 14 tokens")
    assert f"2+3=⟦5{END}⟧" in note


def test_a_template_gets_an_end_and_must_not_forget():
    template = (
        "{% for m in messages %}{{ m.role[0] + ':' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    )
    tokenizer = chatml(template)
    ids, learned = encode_chat(tokenizer, CHAT[1:3])
    assert tokenizer.decode(ids[:-1]) == "u:2+3?\na:5\n"
    assert ids[-1] == tokenizer.eos_id
    assert learned == [(len("u:2+3?\na:"), len(ids))]
    with pytest.raises(DataError, match="learn=last"):
        encode_chat(chatml(template.replace("in messages", "in messages[-2:]")), CHAT[1:])


def test_chat_prompt_with_response(tmp_path, tokenizer):
    rows = [{"prompt": "2+3?", "response": "5"}, {"prompt": CHAT[:2], "response": "5"}]
    examples = load_rows(ExampleDataset, tmp_path, rows, chat=True, system_prompt="Add.")
    assert examples[0] == examples[1].__class__(0, examples[1].ids, examples[1].learned)
    asked = tokenizer.apply_chat_template(CHAT[:2])
    assert tokenizer.decode(examples[0].ids).startswith(asked + "5")


def test_collated_and_cut_to_the_longest(tmp_path, tokenizer):
    rows = [SUM, {"prompt": "1=", "response": "111111"}]
    examples = list(load_rows(ExampleDataset, tmp_path, rows))
    batch = collate_examples(examples, pad_id=tokenizer.eos_id)  # padding with EOS is safe
    assert batch["input_ids"].shape == (2, 9)
    assert batch["input_lengths"].tolist() == [6, 9]
    assert batch["token_mask"].tolist() == [[0] * 4 + [1] * 2 + [0] * 3, [0] * 2 + [1] * 7]
    assert torch.equal(batch["sample_mask"], torch.ones(2))
    rows = [SUM, {"prompt": "2+3=", "response": "5" * 9}]
    dataset = load_rows(ExampleDataset, tmp_path, rows, max_length=6)
    assert (len(dataset), dataset.dropped_too_long, dataset.max_length) == (1, 1, 6)
    with pytest.raises(DataError, match="None is left: raise max_length"):
        load_rows(ExampleDataset, tmp_path, rows, max_length=5)
    with pytest.raises(ConfigError, match="max_length=1 must be at least 2"):
        load_rows(ExampleDataset, tmp_path, rows, max_length=1)


SPELT = {"role": "assistant", "content": "a <|im_end|> b"}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "x"}, {}, "line 1: column 'response' is missing"),
        ({"prompt": "x", "response": 5}, {}, "must be text or a list of chat messages, got int"),
        ({"prompt": "", "response": "5"}, {}, "the prompt is empty"),
        ({"messages": CHAT[:2]}, {}, "has the role 'user'"),
        ({"messages": CHAT[2:3]}, {}, "the first chat message is"),
        ({"messages": "hi"}, {"messages_column": "messages"}, "must be a list of chat messages"),
        ({"prompt": CHAT, "response": "5"}, {}, "the last chat message is the assistant"),
        ({"messages": "hi"}, {}, "column 'response' is missing.*data.messages_column"),
        ({"prompt": "x", "response": "5"}, {"system_prompt": "Add."}, "data.system_prompt is set"),
        (
            {"messages": [*CHAT[:2], SPELT]},
            {},
            "message 2 of the chat contains the text of the end token",
        ),
    ],
)
def test_bad_example_is_named(tmp_path, row, options, message):
    with pytest.raises(DataError, match=message) as refusal:
        load_rows(ExampleDataset, tmp_path, [row], **options)
    assert f"Columns found: {sorted(row)}" in str(refusal.value)
