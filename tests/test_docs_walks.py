"""The walk of docs/howto.md that changes the library, followed as the page says."""

import re

import pytest
import torch
from documented import ROOT
from hf_models import LLAMA3_ROPE, save_random_model
from safetensors.torch import load_file
from test_nemo_kinds import gpt_and_logits

from aligner.checkpoint.hf.families import FAMILIES
from aligner.checkpoint.hf.model_folder import read_hf, save_hf
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer


@pytest.mark.integration
def test_the_model_family_of_the_page_computes_the_numbers_of_transformers(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "howto.md").read_text()
    names = {}
    exec(re.search(r"```python\n# cwm\.py\n(.*?)```", page, re.DOTALL)[1], names)
    monkeypatch.setitem(FAMILIES, "cwm", names["CWM"])
    sizes = {"num_hidden_layers": 5, "sliding_window": 5, "rope_parameters": LLAMA3_ROPE}
    model = save_random_model("cwm", sizes, tmp_path / "model")
    found = read_hf(tmp_path / "model")
    tokens = torch.randint(259, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
    _, logits = gpt_and_logits(found.weights, found.architecture, tokens)
    # float32 rounding of five layers, as in test_hf_families.py.
    assert (logits - expected).abs().max() < 1e-4
    save_hf(tmp_path / "written", found.weights, found.architecture, byte_level_tokenizer().files())
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("model", "written"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert read_hf(tmp_path / "written").architecture == found.architecture
