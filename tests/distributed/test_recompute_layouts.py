"""Recomputed activations, full and selective, change no number in any layout, tied or untied.

Against one process that recomputes nothing. With tied embeddings over two pipeline stages the
gradients of both copies are summed: the copies stay one.
"""

import dataclasses

import pytest
from role_checks import assert_same, launch
from role_worker import train_both

from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights

UNTIED = dataclasses.replace(
    TINY_ARCHITECTURE, num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2
)
MODELS = {"untied": UNTIED, "tied": dataclasses.replace(UNTIED, tie_embeddings=True)}
ONE = "1,1,1,none"
LAYOUTS = ["2,1,1,full", "2,1,1,selective", "1,2,1,none", "1,2,1,full", "1,2,1,selective"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recompute")


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.extended)])
def seen(request, folder):
    model = folder / f"{request.param}.nemo"
    architecture = MODELS[request.param]
    weights = random_weights(architecture, scale=0.2)
    save_nemo(model, weights, architecture, byte_level_tokenizer().files())
    one = train_both(str(model), f"{model}.1", ONE)
    return model, one, launch(2, model, f"{model}.2", LAYOUTS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_one_process(layout, role, seen):
    model, one, many = seen
    files = (f"{model}.1.{ONE}.{role}.nemo", f"{model}.2.{layout}.{role}.nemo")
    assert_same(one[role], many[layout][role], files)
