"""Preference pairs: adjacent rows, chosen first, with the rewards the data gives."""

import contextlib
import json

import pytest
from loaded import load_set

from aligner.algorithms.reward_model.build import kind_of
from aligner.config import RewardRunConfig, parse_config
from aligner.data.preferences import OrderedPairDataset, PairDataset, collate_pairs
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import DataError

ROWS = [
    {"prompt": "2+3=", "chosen": "5", "rejected": "66", "good": 0.9, "bad": 0.25},
    {"prompt": "1+1=", "chosen": "2", "rejected": "3", "good": 1, "bad": 0},
]


def load(tmp_path, rows, kind=PairDataset, **options):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_set(kind, path, byte_level_tokenizer(), **options)


def test_rows_of_a_pair_are_adjacent(tmp_path):
    pairs = load(tmp_path, ROWS, chosen_reward_column="good", rejected_reward_column="bad")
    eos = byte_level_tokenizer().eos_id
    batch = collate_pairs(list(pairs), pad_id=eos)
    encode = byte_level_tokenizer().encode
    texts = ("2+3=5", "2+3=66", "1+1=2", "1+1=3")
    assert batch["input_ids"].tolist() == [[*encode(text), eos, eos][:7] for text in texts]
    assert batch["input_lengths"].tolist() == [6, 7, 6, 6]
    assert batch["token_mask"].sum(1).tolist() == [2, 3, 2, 2]
    assert batch["ground_truth_rewards"].tolist() == pytest.approx([0.9, 0.25, 1.0, 0.0])
    assert batch["preference_strengths"].tolist() == pytest.approx([0.65, 0.65, 1.0, 1.0])
    assert [pair.rewards for pair in load(tmp_path, ROWS)] == [(1.0, 0.0)] * 2
    pairs = load(tmp_path, ROWS, max_length=6)
    assert (len(pairs), pairs.dropped_too_long, pairs.max_length) == (1, 1, 6)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "a"}, "line 1: column 'rejected' is missing"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "are equal"),
        ({**ROWS[0], "good": "high"}, "column 'good' must be a finite number, but it is 'high'"),
        ({**ROWS[0], "good": float("nan")}, "column 'good' must be a finite number, but it is nan"),
        ({**ROWS[0], "good": 10**400}, "column 'good' must be a finite number, but it is 1000"),
        ({**ROWS[0], "good": 1e39}, "finite number, but it is 1e\\+39"),
        ({**ROWS[0], "good": True}, "column 'good' must be a finite number, but it is True"),
    ],
)
def test_bad_row_is_named(tmp_path, row, message):
    with pytest.raises(DataError, match=message) as refusal:
        load(tmp_path, [row], chosen_reward_column="good")
    assert "line 1" in str(refusal.value)


def test_a_preference_of_negative_strength_is_refused_where_strength_counts(tmp_path):
    columns = {"chosen_reward_column": "good", "rejected_reward_column": "bad"}
    swapped = {**ROWS[0], "good": 0.25, "bad": 0.9}
    with pytest.raises(DataError, match=r"line 1: .* 0\.25 \('good'\) .* 0\.9 \('bad'\)\. Swap"):
        load(tmp_path, [swapped], OrderedPairDataset, **columns)
    even = {**ROWS[0], "good": 0.9, "bad": 0.9}
    assert load(tmp_path, [even], OrderedPairDataset, **columns)[0].rewards == (0.9, 0.9)
    assert load(tmp_path, [swapped], **columns)[0].rewards == (0.25, 0.9)  # RPO reads both


@pytest.mark.parametrize(("variant", "refused"), [("plain", 0), ("margin", 1), ("scaled", 1)])
def test_reward_models_know_where_strength_counts(variant, refused, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({**ROWS[0], "good": 0.25, "bad": 0.9}) + "\n")
    rewards = {"chosen_reward_column": "good", "rejected_reward_column": "bad"}
    values = {
        "model": {"restore_from_path": "m.nemo"},
        "data": {"train": {"source": str(path)}, **rewards},
        "trainer": {"reward_model": {"variant": variant}},
    }
    config = parse_config(values, RewardRunConfig)
    with pytest.raises(DataError) if refused else contextlib.nullcontext():
        kind_of(config).load(config.data.train, byte_level_tokenizer(), config.data)
