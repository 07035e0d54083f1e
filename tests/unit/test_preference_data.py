"""Preference pairs: adjacent rows, chosen first, with the rewards the data gives."""

import json

import pytest

from aligner.data.byte_tokenizer import byte_level_tokenizer
from aligner.data.preferences import PairDataset, PairFormat, collate_pairs
from aligner.errors import DataError

ROWS = [
    {"prompt": "2+3=", "chosen": "5", "rejected": "66", "good": 0.9, "bad": 0.25},
    {"prompt": "1+1=", "chosen": "2", "rejected": "3", "good": 1, "bad": 0},
]


def load(tmp_path, rows, **options):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PairDataset.load(path, byte_level_tokenizer(), PairFormat(**options))


def test_rows_of_a_pair_are_adjacent(tmp_path):
    pairs = load(tmp_path, ROWS, chosen_reward_column="good", rejected_reward_column="bad")
    eos = byte_level_tokenizer().eos_id
    batch = collate_pairs(list(pairs), pad_id=eos)
    encode = byte_level_tokenizer().encode
    assert batch["input_ids"].tolist() == [
        [*encode("2+3=5"), eos, eos],
        [*encode("2+3=66"), eos],
        [*encode("1+1=2"), eos, eos],
        [*encode("1+1=3"), eos, eos],
    ]
    assert batch["input_lengths"].tolist() == [6, 7, 6, 6]
    assert batch["token_mask"].sum(1).tolist() == [2, 3, 2, 2]
    assert batch["ground_truth_rewards"].tolist() == pytest.approx([0.9, 0.25, 1.0, 0.0])
    assert batch["preference_strengths"].tolist() == pytest.approx([0.65, 0.65, 1.0, 1.0])


def test_without_rewards_the_better_is_worth_one(tmp_path):
    assert [pair.rewards for pair in load(tmp_path, ROWS)] == [(1.0, 0.0)] * 2


def test_a_pair_is_as_long_as_its_longer_sequence(tmp_path):
    pairs = load(tmp_path, ROWS, max_length=6)
    assert (len(pairs), pairs.dropped_too_long, pairs.max_length) == (1, 1, 6)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "a"}, "line 1: column 'rejected' is missing"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "are the same; remove the row"),
        ({**ROWS[0], "good": "high"}, "column 'good' must be a number, it is 'high'"),
        ({**ROWS[0], "good": True}, "column 'good' must be a number, it is True"),
    ],
)
def test_bad_row_is_named(tmp_path, row, message):
    with pytest.raises(DataError, match=message) as refusal:
        load(tmp_path, [row], chosen_reward_column="good")
    assert "line 1" in str(refusal.value)
