"""A mixture of experts in every layout gives one process's numbers, forward and after two updates.

Policy and critic: answers, loss, gradient norm, responses drawn, answers after two updates and the
weights of the `.nemo` that the layout writes.
"""

import dataclasses
from functools import cache

import pytest
from role_checks import SMALL, assert_same, launch, write_random
from role_worker import train_both

ARCHITECTURE = dataclasses.replace(
    SMALL, num_moe_experts=4, moe_ffn_hidden_size=24, family="mixtral"
)
ONE = "1,1,1,none"
# "tensor,pipeline,expert,recompute", and whether communication is in the background; the
# data-parallel size is what is left of the processes.
LAYOUTS = {
    2: {
        "data 2, experts 2": "1,1,2,none",
        "data 2, in the background": "1,1,1,none,overlap",
        "tensor 2, experts 2": "2,1,2,full",
    },
    4: {"pipe 2, data 2, experts 2": "1,2,2,selective"},
}
FURTHER = {  # by `make test-extended`: four processes on a small machine take long
    4: {
        "tensor 2, data 2, experts 2": "2,1,2,none",
        "data 4, experts 2": "1,1,2,none",
        "tensor 2, data 2": "2,1,1,none",
        "tensor 2, data 2, experts 4": "2,1,4,none",
    }
}
CELLS = [
    pytest.param(ranks, layout, id=name, marks=marks)
    for table, marks in ((LAYOUTS, ()), (FURTHER, pytest.mark.extended))
    for ranks, layouts in table.items()
    for name, layout in layouts.items()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("moe")


@pytest.fixture(scope="module")
def seen(folder):
    model = write_random(folder / "moe.nemo", ARCHITECTURE)
    one = train_both(str(model), str(folder / "1.pt"), ONE)

    @cache
    def of(ranks, is_further):
        table = FURTHER if is_further else LAYOUTS
        return launch(ranks, model, folder / f"{ranks}.pt", table[ranks].values())

    return one, of


@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(("ranks", "layout"), CELLS)
def test_a_layout_equals_one_process(ranks, layout, role, seen, folder):
    one, of = seen
    spread = of(ranks, layout not in LAYOUTS[ranks].values())
    files = (folder / f"1.pt.{ONE}.{role}.nemo", folder / f"{ranks}.pt.{layout}.{role}.nemo")
    many = spread[layout][role]
    assert_same(one[role], many, files)
    assert len(many["generated"]) == (8 if role == "actor" else 0)
