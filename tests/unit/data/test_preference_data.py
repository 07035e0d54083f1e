"""Preference pairs (adjacent rows, chosen first), and labels with mismatched responses."""

import contextlib

import pytest
import torch
from loaded import load_rows, write_rows

from aligner.algorithms.reward_model.build import kind_of
from aligner.config import RewardRunConfig, parse_config
from aligner.data.preferences import (
    LabelledDataset,
    OrderedPairDataset,
    PairDataset,
    collate_labelled,
    collate_pairs,
)
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import DataError

ROWS = [
    {"prompt": "2+3=", "chosen": "5", "rejected": "66", "good": 0.9, "bad": 0.25},
    {"prompt": "1+1=", "chosen": "2", "rejected": "3", "good": 1, "bad": 0},
]
LABELLED = [
    {"prompt": "2+3=", "response": "5", "label": True},
    {"prompt": "2+3=", "response": "66", "label": 0},
    {"prompt": "1+1=", "response": "2", "label": 1},
]
REWARDS = {"chosen_reward_column": "good", "rejected_reward_column": "bad"}
EOS = byte_level_tokenizer().eos_id


def encoded(text):
    return [*byte_level_tokenizer().encode(text), EOS]


def test_rows_of_a_pair_are_adjacent(tmp_path):
    pairs = load_rows(PairDataset, tmp_path, ROWS, **REWARDS)
    batch = collate_pairs(list(pairs), pad_id=EOS)
    texts = ("2+3=5", "2+3=66", "1+1=2", "1+1=3")
    assert batch["input_ids"].tolist() == [[*encoded(text), EOS][:7] for text in texts]
    assert batch["input_lengths"].tolist() == [6, 7, 6, 6]
    assert batch["token_mask"].sum(1).tolist() == [2, 3, 2, 2]
    assert batch["ground_truth_rewards"].tolist() == pytest.approx([0.9, 0.25, 1.0, 0.0])
    assert batch["preference_strengths"].tolist() == pytest.approx([0.65, 0.65, 1.0, 1.0])
    plain = load_rows(PairDataset, tmp_path, ROWS, max_length=6)
    assert plain[0].rewards == (1.0, 0.0)
    assert (len(plain), plain.dropped_too_long, plain.max_length) == (1, 1, 6)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "66"}, "are equal"),
        ({"good": "high"}, "column 'good' must be a finite number, but it is 'high'"),
        ({"good": float("nan")}, "column 'good' must be a finite number, but it is nan"),
        ({"good": 1e39}, r"column 'good' must be a finite number, but it is 1e\+39"),
        ({"good": True}, "column 'good' must be a finite number, but it is True"),
    ],
)
def test_bad_pair_is_named(tmp_path, row, message):
    with pytest.raises(DataError, match=f"line 1: .*{message}"):
        load_rows(PairDataset, tmp_path, [{**ROWS[0], **row}], chosen_reward_column="good")


@pytest.mark.parametrize(("variant", "refused"), [("plain", 0), ("margin", 1), ("scaled", 1)])
def test_a_preference_of_negative_strength_is_refused_where_strength_counts(
    variant, refused, tmp_path
):
    values = {
        "model": {"restore_from_path": "m.nemo"},
        "data": {"train": {"source": str(tmp_path / "x.jsonl")}, **REWARDS},
        "trainer": {"reward_model": {"variant": variant}},
    }
    config = parse_config(values, RewardRunConfig)
    write_rows(tmp_path / "x.jsonl", [{**ROWS[0], "good": 0.25, "bad": 0.9}])
    message = r"line 1: .* 0\.25 \('good'\), .* 0\.9 \('bad'\)\. Swap"
    with pytest.raises(DataError, match=message) if refused else contextlib.nullcontext():
        loaded = kind_of(config).load(config.data.train, byte_level_tokenizer(), config.data)
        assert loaded[0].rewards == (0.25, 0.9)
    even = {**ROWS[0], "good": 0.9, "bad": 0.9}
    pairs = load_rows(OrderedPairDataset, tmp_path, [even], **REWARDS)
    assert pairs[0].rewards == (0.9, 0.9)


def test_a_prompt_is_joined_by_the_nearest_earlier_response_to_another_prompt(tmp_path):
    rows = load_rows(LabelledDataset, tmp_path, LABELLED)
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
    loaded = load_rows(LabelledDataset, tmp_path, rows, max_length=17)  # of the last row's length
    assert loaded[0].mismatched.ids == encoded("long prompt=1")
    with pytest.raises(DataError, match=r"x\.jsonl: row 1 has a prompt of 12 tokens"):
        load_rows(LabelledDataset, tmp_path, [rows[0], rows[2]], max_length=17)
    with pytest.raises(DataError, match="other prompts"):
        load_rows(LabelledDataset, tmp_path, LABELLED[:2])


def test_columns_of_a_batch(tmp_path):
    rows = load_rows(LabelledDataset, tmp_path, LABELLED)
    batch = collate_labelled([rows[1], rows[2]], pad_id=EOS)
    assert batch["desirable"].tolist() == [0.0, 1.0]
    assert batch["input_ids"].tolist() == [encoded("2+3=66"), [*encoded("1+1=2"), EOS]]
    assert batch["mismatched_input_ids"].tolist() == [[*encoded("2+3=2"), EOS], encoded("1+1=66")]
    assert batch["mismatched_token_mask"].sum(1).tolist() == [2, 3]
    assert "ref_logprobs" not in batch
    first, mismatched = (
        type(each)(each.id, each.ids, each.learned, torch.arange(1.0, 1 + each.learned_tokens))
        for each in rows[2].examples
    )
    batch = collate_labelled([rows[2].with_examples([first, mismatched])], pad_id=EOS)
    assert batch["ref_logprobs"].tolist() == [[0, 0, 0, 0, 1, 2]]
    assert batch["mismatched_ref_logprobs"].tolist() == [[0, 0, 0, 0, 1, 2, 3]]


@pytest.mark.parametrize("label", ["yes", 2, None, 0.5])
def test_bad_label_is_named(tmp_path, label):
    with pytest.raises(DataError, match="line 1: column 'label' must be true or false"):
        load_rows(LabelledDataset, tmp_path, [{**LABELLED[0], "label": label}])
