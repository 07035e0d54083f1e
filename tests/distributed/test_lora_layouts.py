"""Adapters learn in every layout what they learn in one process, with dropout too.

Scores, what training reports, the gradient of every adapter and head, and the weights after two
updates, theirs and the merged ones, within 1e-5 of the largest value (see `test_layouts`).
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from lora_worker import LORA
from ranks import run_ranks
from role_checks import assert_near, difference

from aligner.checkpoint.adapters import Adapters, adapter_shapes, save_adapters
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE

WORKER = Path(__file__).with_name("lora_worker.py")
ONE = "1,1,1,0"
# tensor, pipeline, context, sequence parallel, mode; the rest of the processes is data parallel
FEW = [
    "2,1,1,1,packed",
    "1,2,1,0,packed",
    f"{ONE},dropout,packed",
    "2,1,1,0,dropout,dynamic",
    "1,1,2,0,dropout,packed",
]
FURTHER = [
    f"{ONE},padded",
    "2,1,1,0,padded",
    "2,1,1,1,padded",
    "1,1,2,0,packed",
    "2,1,1,1,dropout,packed",
    "1,2,1,0,dropout,padded",
]
# name: processes, layouts
RUNS = {
    "one process": (1, [f"{ONE},padded", f"{ONE},dropout,padded", f"{ONE},packed"]),
    "two": (2, FEW),
    "two, further": (2, FURTHER),
    "four": (4, ["2,2,1,0,packed", "2,1,1,1,dropout,packed", "2,1,2,1,packed"]),
}
NAMES = [
    "one process",
    "two",
    *(pytest.param(name, marks=pytest.mark.extended) for name in ("two, further", "four")),
]


def tensors_that_do_something():
    """Adapters whose B is not zero, so that A has a gradient from the first update on."""
    generator = torch.Generator().manual_seed(4)
    shapes = adapter_shapes(TINY_ARCHITECTURE, LORA)
    return {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def launch(tiny_nemo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    save_adapters(folder / "begin.lora.safetensors", Adapters(LORA, tensors_that_do_something()))

    @cache
    def seen(name):
        processes, layouts = RUNS[name]
        output = folder / f"{name}.pt"
        arguments = [tiny_nemo, folder / "begin.lora.safetensors", output, *layouts]
        run_ranks(WORKER, processes, arguments, timeout_s=280)
        return torch.load(output, weights_only=True)

    return seen


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_equals_one_process(name, launch):
    for layout, roles in launch(name).items():
        drops = "dropout," if "dropout" in layout else ""
        one = launch("one process")[f"{ONE},{drops}padded"]
        for role, expected in one.items():
            assert (expected["after"] - expected["before"]).abs().max() > 1e-4
            assert_near(expected, roles[role], f"{layout} {role}")


def test_dropout_changes_what_is_learned_and_not_what_is_said(launch):
    kept, dropped = (
        launch("one process")[f"{ONE},padded"],
        launch("one process")[f"{ONE},dropout,padded"],
    )
    for role in ("actor", "critic"):
        assert torch.equal(kept[role]["before"], dropped[role]["before"])
        for name, gradient in kept[role]["gradient"].items():
            if name.endswith(".lora.a"):
                assert difference(gradient, dropped[role]["gradient"][name]) > 0.05


def test_the_reference_is_what_training_began_with(launch):
    actor = launch("one process")[f"{ONE},padded"]["actor"]
    assert torch.equal(actor["reference"], actor["before"])
