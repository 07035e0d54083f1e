"""Unequal pipeline stages, and frozen routers of experts, give one process's numbers."""

import dataclasses

import pytest
import torch
from role_checks import assert_same, one_and_two
from role_worker import make_batch
from test_moe_layouts import ARCHITECTURE

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import OptimConfig
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings

LAYERS = dataclasses.replace(ARCHITECTURE, num_layers=3)
ONE = "1,1,1,none,frozen"
LAYOUTS = {"data 2": ONE, "two layers before one": "1,2,1,none,frozen,uneven"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return one_and_two(tmp_path_factory.mktemp("stages"), LAYERS, ONE, LAYOUTS.values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_equals_one_process(layout, role, seen):
    model, one, many = seen
    files = [f"{model}.{n}.{each}.{role}.nemo" for n, each in ((1, ONE), (2, layout))]
    assert_same(one[role], many[layout][role], files)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_routers_stay_and_all_other_weights_move(role, seen):
    model = seen[0]
    with open_nemo(model) as before, open_nemo(f"{model}.1.{ONE}.{role}.nemo") as after:
        moved = {
            name: not torch.equal(tensor, after.weights[name])
            for name, tensor in before.weights.items()
            if name in after.weights
        }
    assert [name for name, is_moved in moved.items() if is_moved == (".router." in name)] == []
    assert sum(".router." in name for name in moved) == LAYERS.num_layers


def actor(model, learns=True):
    settings = RoleSettings(
        optim=OptimConfig(lr=1e-2) if learns else None,
        freeze_moe_router=True,
        micro_batch_size=8,
        global_batch_size=8,
    )
    role = load_from_nemo(MegatronGPTActorModel, settings, restore_path=str(model))
    role.setup_training()
    role.loss_fn = PPOPolicyLoss()
    return role


def test_a_run_state_has_frozen_weights_too(seen):
    first, second = actor(seen[0]), actor(seen[0])
    first.prepare_for_training()
    first.training_update(make_batch())
    state = first.run_state()
    routers = {name for name in state["slices"] if ".router." in name}
    assert len(routers) == LAYERS.num_layers
    assert {*state["slices"]["decoder.final_layernorm.weight"]["tensors"]} > {"weight"}
    for name in routers:
        assert {*state["slices"][name]["tensors"]} == {"weight"}
    with torch.no_grad():
        for name, parameter in second.gpt.named_parameters():
            if ".router." in name:
                parameter.zero_()
    second.load_run_state([state])
    restored = dict(second.gpt.named_parameters())
    for name, parameter in first.gpt.named_parameters():
        assert torch.equal(parameter, restored[name]), name
    for role in (first, second):
        role.training_update(make_batch())
    for name, parameter in first.gpt.named_parameters():
        assert torch.equal(parameter, restored[name]), name
