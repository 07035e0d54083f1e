"""Files that NeMo itself wrote give the log-probs of the model that wrote them."""

import os
from pathlib import Path

import pytest
import torch

from aligner.checkpoint.gpt_weights import load_weights
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.models.gpt.megatron.build import build_gpt
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

SHARED = Path(os.environ.get("ALIGNER_SHARED", Path(__file__).parents[4] / "shared"))
FILES = ["01_llama_torchdist", "03_gpt_singlefile", "04_llama_tp2", "05_llama_te_torchdist"]


@pytest.mark.parametrize("name", FILES)
def test_log_probs_equal_the_writers(name):
    folder = SHARED / "data" / "nemo"
    if not (folder / f"{name}.nemo").exists():
        pytest.skip(f"needs {name}.nemo and .ref.pt in data/nemo of $ALIGNER_SHARED ({SHARED})")
    reference = torch.load(folder / f"{name}.ref.pt", weights_only=True)
    initialize_parallel()
    with open_nemo(folder / f"{name}.nemo") as nemo:
        gpt = build_gpt(nemo.architecture).eval()
        load_weights(gpt, nemo.weights, nemo.architecture)
        vocabulary = nemo.architecture.vocab_size
        assert nemo.tokenizer.vocab_size == vocabulary
    assert reference["logits"].shape[-1] == vocabulary
    tokens = reference["tokens"]
    with torch.no_grad():
        logits = gpt(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    found = logits[..., :vocabulary].log_softmax(-1)
    gap = (found - reference["logits"].log_softmax(-1)).abs().max()
    assert gap < 2e-4


def test_the_same_model_in_three_layouts_is_the_same_weights():
    paths = [SHARED / "data" / "nemo" / f"{name}.nemo" for name in FILES if "llama" in name]
    if not all(path.exists() for path in paths):
        pytest.skip(f"needs the Llama files in data/nemo of $ALIGNER_SHARED ({SHARED})")
    with open_nemo(paths[0]) as one, open_nemo(paths[1]) as two, open_nemo(paths[2]) as three:
        for name in one.weights:
            assert torch.equal(one.weights[name], two.weights[name]), name
            assert torch.equal(one.weights[name], three.weights[name]), name
