"""Weights that are read when indexed: loading a model reads each tensor once."""

from collections import Counter

import pytest
import torch

from aligner.checkpoint.canonical import EMBEDDING
from aligner.checkpoint.convert import convert
from aligner.checkpoint.gpt_weights import GatheredWeights, load_weights
from aligner.checkpoint.hf.model_folder import SafetensorsFolder
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.nemo.weights import LazyWeights
from aligner.models.gpt.megatron.build import build_gpt
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration


@pytest.fixture
def reads(monkeypatch):
    """How often each tensor is read by instances of a class."""

    def reads_of(cls, method="__getitem__"):
        seen, plain = Counter(), getattr(cls, method)

        def read(self, name, *ranks):
            seen[name] += 1
            return plain(self, name, *ranks)

        monkeypatch.setattr(cls, method, read)
        return seen

    return reads_of


def load(path):
    initialize_parallel()
    with open_model(path) as source:
        gpt = build_gpt(source.architecture, initialize=False)
        load_weights(gpt, source.weights, source.architecture)
    return gpt, source.architecture


def test_each_weight_is_read_once(tiny_nemo, reads, tmp_path):
    seen = reads(LazyWeights, "share")
    load(tiny_nemo)
    assert seen[EMBEDDING] == 1
    assert set(seen.values()) == {1}
    convert(tiny_nemo, tmp_path / "hf")
    seen = reads(SafetensorsFolder)
    load(tmp_path / "hf")
    assert len(seen) > 10
    assert set(seen.values()) == {1}


def test_no_rank_gathers_to_find_out_what_there_is(tiny_nemo, reads):
    gathered = GatheredWeights(*load(tiny_nemo))
    seen = reads(GatheredWeights)
    assert EMBEDDING in gathered
    assert "no such weight" not in gathered
    assert not seen
    assert isinstance(gathered[EMBEDDING], torch.Tensor)
