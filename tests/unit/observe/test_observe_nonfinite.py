"""A non-finite number leaves its samples behind."""

import json
import math

import pytest
import torch

from aligner.errors import StorageError, training_step
from aligner.observe.nonfinite import offending_rows, write_nonfinite


def batch() -> dict:
    advantages = torch.zeros(3, 4)
    advantages[1, 2] = math.nan
    return {
        "input_ids": torch.arange(12).reshape(3, 4),
        "sample_ids": torch.tensor([10, 11, 12]),
        "rewards": torch.tensor([0.0, math.inf, 1.0]),
        "advantages": advantages,
    }


def test_the_evidence_is_written_if_the_directory_allows(tmp_path):
    texts = ["a", "2+2=5", "c"]
    scalars = {"loss": torch.tensor(math.nan), "lr": 0.5}
    with training_step(12):
        path = write_nonfinite(tmp_path, "policy", scalars, batch(), texts, updates=30, rank=3)
        again = write_nonfinite(tmp_path, "policy", scalars, batch(), texts, rank=3)
        other = write_nonfinite(tmp_path, "critic", scalars, batch(), texts, rank=3)
    assert path == tmp_path / "nonfinite" / "step_000012_policy_update_000_rank_00003.json"
    report = json.loads(path.read_text())
    assert (report["step"], report["rank"], report["not_finite"]) == (12, 3, ["loss"])
    assert (report["role"], report["update"], report["updates_made"]) == ("policy", 0, 30)
    assert report["scalars"] == {"loss": "nan", "lr": "0.5"}
    assert report["samples"] == [
        {
            "row": 1,
            "sample_ids": "11",
            "rewards": "inf",
            "not_finite_at": {"advantages": [2]},
            "text": "2+2=5",
        }
    ]
    assert again.name == "step_000012_policy_update_000_rank_00003_2.json"
    assert other.name == "step_000012_critic_update_000_rank_00003.json"
    tensors = torch.load(path.with_suffix(".pt"), weights_only=True)
    assert tensors["input_ids"].tolist() == [[4, 5, 6, 7]]
    assert math.isnan(tensors["advantages"][0, 2])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "nonfinite").write_text("")
    with pytest.raises(StorageError, match="nonfinite"):
        write_nonfinite(tmp_path / "full", "policy", {"loss": math.nan}, batch())
    assert offending_rows(batch()).tolist() == [False, True, False]
    clean = {"input_ids": torch.zeros(2, 4), "advantages": torch.zeros(2, 4)}
    assert offending_rows(clean).tolist() == [True, True]
