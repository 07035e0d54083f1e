"""Adapters learn in every layout what they learn in one process, with dropout too.

Scores, what training reports, the gradient of every adapter and head, and the weights after two
updates, theirs and the merged ones, within 1e-5 of the largest value (see `test_layouts`).
"""

import dataclasses
from functools import cache

import pytest
import torch
from layout_worker import (
    OPTIM,
    gradient_of,
    handle_of,
    loss_of,
    make_batch,
    model_config,
    reference,
    reported,
    scores,
    weights_of,
)
from ranks import on_ranks
from role_checks import assert_near, difference

from aligner.checkpoint.adapters import Adapters, adapter_shapes, save_adapters
from aligner.config import LoraConfig, OptimConfig, PeftConfig
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE

LORA = LoraConfig(adapter_dim=4, alpha=6.0)
LEARNING = OptimConfig(lr=1e-3, eps=OPTIM.eps)

ONE = "1,1,1,0"
# tensor, pipeline, context, sequence parallel, mode; the rest of the processes is data parallel
FEW = [
    "2,1,1,1,packed",
    "1,2,1,0,packed",
    f"{ONE},dropout,packed",
    "2,1,1,0,dropout,dynamic",
    "1,1,2,0,dropout,packed",
]
# name: processes, layouts
RUNS = {
    "one process": (1, [f"{ONE},padded", f"{ONE},dropout,padded", f"{ONE},packed"]),
    "two": (2, FEW),
    "four": (4, ["2,2,1,0,packed", "2,1,1,1,dropout,packed", "2,1,2,1,packed"]),
}
NAMES = ["one process", "two", pytest.param("four", marks=pytest.mark.extended)]


def config_of(model, adapters, layout):
    drops = "dropout" in layout
    lora = dataclasses.replace(LORA, adapter_dropout=0.25 if drops else 0.0)
    return dataclasses.replace(
        model_config(model, layout.replace("dropout,", "")),
        peft=PeftConfig("lora", adapters, lora),
        optim=LEARNING,
    )


def adapters_of(handle):
    gathered = handle.worker_group.worker.model.adapters.gather()
    return {name: value.clone() for name, value in gathered.items()}


def learn(role, config, layout):
    """Two updates: what was reported, the first gradient, the weights they led to."""
    batch, handle = make_batch(layout), handle_of(role, config, LEARNING)
    loss, before = loss_of(handle), scores(handle, batch)
    handle.prepare_for_training()
    first = handle.train(batch, loss)
    seen = {"first": reported(first), "gradient": gradient_of(handle, adapters_of)}
    seen["second"] = reported(handle.train(batch, loss))
    seen["trained"] = adapters_of(handle)
    seen["merged"] = weights_of(handle)
    handle.prepare_for_inference()
    after = scores(handle, batch)
    return {**seen, "before": before, "after": after, **reference(handle, batch)}


def learn_all(model, adapters, layouts):
    seen = {}
    for layout in layouts:
        config = config_of(model, adapters, layout)
        seen[layout] = {role: learn(role, config, layout) for role in ("actor", "critic")}
    return seen


def tensors_that_do_something():
    """Adapters whose B is not zero, so that A has a gradient from the first update on."""
    generator = torch.Generator().manual_seed(4)
    shapes = adapter_shapes(TINY_ARCHITECTURE, LORA)
    return {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def launch(tiny_nemo, tmp_path_factory):
    adapters = tmp_path_factory.mktemp("lora") / "begin.lora.safetensors"
    save_adapters(adapters, Adapters(LORA, tensors_that_do_something()))

    def seen(name):
        processes, layouts = RUNS[name]
        return on_ranks(processes, learn_all, str(tiny_nemo), str(adapters), layouts)

    return cache(seen)


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
        launch("one process")[f"{ONE},{mode}"] for mode in ("padded", "dropout,padded")
    )
    for role in ("actor", "critic"):
        assert torch.equal(kept[role]["before"], dropped[role]["before"])
        for name, gradient in kept[role]["gradient"].items():
            if name.endswith(".lora.a"):
                assert difference(gradient, dropped[role]["gradient"][name]) > 0.05


def test_the_reference_is_what_training_began_with(launch):
    actor = launch("one process")[f"{ONE},padded"]["actor"]
    assert torch.equal(actor["reference"], actor["before"])
