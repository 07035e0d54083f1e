"""In every layout a policy hands over exactly the weights of its file, by Hugging Face's names."""

import dataclasses
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from aligner.checkpoint.hf.families import config_to_hf
from aligner.checkpoint.hf.tensors import HuggingFaceView
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights

DENSE = dataclasses.replace(
    TINY_ARCHITECTURE, num_layers=2, vocab_size=260, bias_qkv=True, family="qwen2"
)
TIED = dataclasses.replace(TINY_ARCHITECTURE, num_layers=2, tie_embeddings=True)
EXPERTS = dataclasses.replace(TINY_ARCHITECTURE, num_layers=2, num_moe_experts=4, family="mixtral")
MODELS = {"dense": DENSE, "tied": TIED, "experts": EXPERTS}
CASES = {
    2: ["dense:2,1,1", "dense:1,2,1", "tied:1,2,1", "experts:1,1,2"],
    4: ["dense:2,2,1", "experts:2,1,4"],
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", CASES)
def test_weights_leave_as_they_are_in_the_file(ranks, tmp_path):
    weights = {}
    for name, architecture in MODELS.items():
        weights[name] = random_weights(architecture, seed=3)
        files = byte_level_tokenizer().files()
        save_nemo(tmp_path / name, weights[name], architecture, files)
    cases = [f"{tmp_path}/{case}" for case in CASES[ranks]]
    script = Path(__file__).with_name("refit_rank.py")
    run_ranks(script, ranks, [tmp_path / "seen.pt", *cases], timeout_s=380)
    seen = torch.load(tmp_path / "seen.pt")
    for case in cases:
        name = Path(case).name.split(":")[0]
        architecture = MODELS[name]
        family, _ = config_to_hf(architecture)
        expected = HuggingFaceView(weights[name], family.table, architecture)
        assert list(seen[case]) == list(expected)
        for key, tensor in expected.items():
            assert torch.equal(seen[case][key], tensor), (case, key)
