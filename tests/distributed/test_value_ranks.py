"""A critic on two data-parallel workers: when weights are gathered, where they are, what is saved.

Forward pre-hooks, host memory and a checkpoint's round trip change no bit of the training, whose
optimizer is shared out over the workers; on another layout rounding differs.
"""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("value_rank.py")


@pytest.fixture(scope="module")
def folder(tiny_nemo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("value")
    run_ranks(WORKER, 2, [tiny_nemo, folder], timeout_s=200)
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    return torch.load(folder / "seen.pt", weights_only=True)


@pytest.mark.parametrize("way", ["hooked", "offloaded"])
def test_the_way_changes_nothing(way, seen):
    plain, other = seen["plain"], seen[way]
    assert plain["losses"][0] > plain["losses"][2]  # something was learnt
    assert other["losses"] == plain["losses"]
    assert torch.equal(other["values"], plain["values"])
    assert plain["weights"].keys() == other["weights"].keys()
    for name, weight in plain["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name


def test_the_gather_was_left_to_the_next_forward_pass(seen):
    assert seen["hooked"]["apart"] > 0


def test_a_checkpoint_continues(seen, folder):
    expected = seen["plain"]["all losses"]
    assert expected[:3] == seen["plain"]["losses"]
    assert seen["continued"]["losses"] == expected[3:]
    assert seen["continued elsewhere"]["losses"] == pytest.approx(expected[3:], rel=1e-2)
    files = sorted(path.name for path in (folder / "optimizer").iterdir())
    assert files == ["checksums.json", "rank_00000.pt", "rank_00001.pt"]
    assert (folder / "tokenizer" / "tokenizer.json").exists()
