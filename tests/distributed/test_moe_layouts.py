"""A mixture of experts in every layout gives one process's numbers, forward and after two updates.

Policy and critic: answers, loss, gradient norm, responses drawn, answers after two updates and the
weights of the `.nemo` that the layout writes.
"""

import dataclasses

import pytest
from role_checks import assert_same, launch
from role_worker import train_both

from aligner.checkpoint.nemo import save_nemo
from aligner.checkpoint.tiny import TINY_ARCHITECTURE, random_weights
from aligner.data.byte_tokenizer import byte_level_tokenizer

ARCHITECTURE = dataclasses.replace(
    TINY_ARCHITECTURE,
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    num_moe_experts=4,
    moe_ffn_hidden_size=24,
    family="mixtral",
)
ONE = "1,1,1,none"
# "tensor,pipeline,expert,recompute"; the data-parallel size is what is left of the processes.
LAYOUTS = {
    2: {"data 2, experts 2": "1,1,2,none", "tensor 2, experts 2": "2,1,2,full"},
    4: {
        "data 4, experts 2": "1,1,2,none",
        "tensor 2, data 2": "2,1,1,none",
        "tensor 2, data 2, experts 2": "2,1,2,none",
        "tensor 2, data 2, experts 4": "2,1,4,none",
        "pipe 2, data 2, experts 2": "1,2,2,selective",
    },
}
CELLS = [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("moe")


@pytest.fixture(scope="module")
def seen(folder):
    model = folder / "moe.nemo"
    weights = random_weights(ARCHITECTURE, scale=0.2)
    save_nemo(model, weights, ARCHITECTURE, byte_level_tokenizer().files())
    runs = {1: {ONE: train_both(str(model), str(folder / "1.pt"), ONE)}}
    for ranks, layouts in LAYOUTS.items():
        runs[ranks] = launch(ranks, model, folder / f"{ranks}.pt", layouts.values())
    return runs


@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(("ranks", "name"), CELLS, ids=[name for _, name in CELLS])
def test_a_layout_equals_one_process(ranks, name, role, seen, folder):
    layout = LAYOUTS[ranks][name]
    files = (folder / f"1.pt.{ONE}.{role}.nemo", folder / f"{ranks}.pt.{layout}.{role}.nemo")
    one, many = seen[1][ONE][role], seen[ranks][layout][role]
    assert_same(one, many, files)
    assert len(many["generated"]) == (8 if role == "actor" else 0)
