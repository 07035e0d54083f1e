"""Labelled responses: the label, and the mismatched response that every prompt brings."""

import json

import pytest
import torch
from loaded import load_set

from aligner.data.preferences import LabelledDataset, collate_labelled
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import DataError

ROWS = [
    {"prompt": "2+3=", "response": "5", "label": True},
    {"prompt": "2+3=", "response": "66", "label": 0},
    {"prompt": "1+1=", "response": "2", "label": 1},
]
EOS = byte_level_tokenizer().eos_id


def load(tmp_path, rows, **options):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_set(LabelledDataset, path, byte_level_tokenizer(), **options)


def encoded(text):
    return [*byte_level_tokenizer().encode(text), EOS]


def test_a_prompt_is_joined_by_the_nearest_earlier_response_to_another_prompt(tmp_path):
    rows = load(tmp_path, ROWS)
    assert [row.desirable for row in rows] == [True, False, True]
    # The row before the second asks the same, so it too gets the last row's response.
    mismatched = [encoded("2+3=2"), encoded("2+3=2"), encoded("1+1=66")]
    assert [row.mismatched.ids for row in rows] == mismatched
    assert [row.mismatched.learned for row in rows] == [[(4, 6)], [(4, 6)], [(4, 7)]]
    assert rows.max_length == 7


def test_a_mismatched_response_fits_the_limit_and_needs_another_prompt(tmp_path):
    rows = [
        {"prompt": "long prompt=", "response": "5", "label": True},
        {"prompt": "b", "response": "1", "label": False},
        {"prompt": "a", "response": "a long response", "label": True},
    ]
    loaded = load(tmp_path, rows, max_length=17)  # of the last row's length
    assert loaded[0].mismatched.ids == encoded("long prompt=1")
    with pytest.raises(DataError, match=r"x\.jsonl: row 1 has a prompt of 12 tokens"):
        load(tmp_path, [rows[0], rows[2]], max_length=17)
    with pytest.raises(DataError, match="give rows with different prompts"):
        load(tmp_path, ROWS[:2])


def test_columns_of_a_batch(tmp_path):
    rows = load(tmp_path, ROWS)
    batch = collate_labelled([rows[1], rows[2]], pad_id=EOS)
    assert batch["desirable"].tolist() == [0.0, 1.0]
    assert batch["input_ids"].tolist() == [encoded("2+3=66"), [*encoded("1+1=2"), EOS]]
    assert batch["mismatched_input_ids"].tolist() == [[*encoded("2+3=2"), EOS], encoded("1+1=66")]
    assert batch["mismatched_token_mask"].sum(1).tolist() == [2, 3]
    assert "ref_logprobs" not in batch
    row = load(tmp_path, ROWS)[2]
    first, mismatched = (
        type(each)(each.id, each.ids, each.learned, torch.arange(1.0, 1 + each.learned_tokens))
        for each in row.examples
    )
    batch = collate_labelled([row.with_examples([first, mismatched])], pad_id=EOS)
    assert batch["ref_logprobs"].tolist() == [[0, 0, 0, 0, 1, 2]]
    assert batch["mismatched_ref_logprobs"].tolist() == [[0, 0, 0, 0, 1, 2, 3]]


@pytest.mark.parametrize("label", ["yes", 2, None, 0.5])
def test_bad_label_is_named(tmp_path, label):
    with pytest.raises(DataError, match="line 1: column 'label' must be true or false"):
        load(tmp_path, [{**ROWS[0], "label": label}])
