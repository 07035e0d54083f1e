"""Recomputed activations, full and selective, change no number in any layout, tied or untied.

Against one process that recomputes nothing. With tied embeddings over two pipeline stages the
gradients of both copies are summed: the copies stay one.
"""

import dataclasses

import pytest
from role_checks import SMALL, assert_same, one_and_two

MODELS = {"untied": SMALL, "tied": dataclasses.replace(SMALL, tie_embeddings=True)}
ONE = "1,1,1,none"
LAYOUTS = ["2,1,1,full", "2,1,1,selective", "1,2,1,none", "1,2,1,full", "1,2,1,selective"]


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.extended)])
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"recompute_{request.param}")
    return one_and_two(folder, MODELS[request.param], ONE, LAYOUTS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_one_process(layout, role, seen):
    model, one, many = seen
    files = (f"{model}.1.{ONE}.{role}.nemo", f"{model}.2.{layout}.{role}.nemo")
    assert_same(one[role], many[layout][role], files)
