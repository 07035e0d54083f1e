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


@pytest.mark.integration
def test_each_weight_is_read_once(tiny_nemo, tmp_path, monkeypatch):
    def count(cls, method="__getitem__"):
        seen, plain = Counter(), getattr(cls, method)

        def read(self, name, *ranks):
            seen[name] += 1
            return plain(self, name, *ranks)

        monkeypatch.setattr(cls, method, read)
        return seen

    initialize_parallel()
    convert(tiny_nemo, tmp_path / "hf")
    reads = [count(LazyWeights, "share"), count(SafetensorsFolder)]
    for path, seen in zip((tiny_nemo, tmp_path / "hf"), reads, strict=True):
        with open_model(path) as source:
            gpt = build_gpt(source.architecture, initialize=False)
            load_weights(gpt, source.weights, source.architecture)
        assert len(seen) > 10
        assert set(seen.values()) == {1}
    # No rank gathers to learn the names.
    gathered, seen = GatheredWeights(gpt, source.architecture), count(GatheredWeights)
    assert EMBEDDING in gathered
    assert "no such weight" not in gathered
    assert not seen
    assert isinstance(gathered[EMBEDDING], torch.Tensor)
