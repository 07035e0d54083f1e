"""What leaves a GPU comes back to the bit, and leaves room; a saved run goes on.

1. Adam's moments, parked weights and gradients, and a swapped reference.
2. A run state that is saved and loaded continues.
"""

import pytest
import torch
from facts import ACTOR, batch, build

from aligner.checkpoint.run_state.worker_state import save_worker_state
from aligner.models.gpt import MegatronGPTActorModel
from aligner.models.worker import RoleWorker

PRECISIONS = ["32", pytest.param("bf16", marks=pytest.mark.extended)]


def trained(models, precision, **settings):
    role = build(MegatronGPTActorModel, models / "plain.nemo", precision=precision, **settings)
    role.loss_fn = ACTOR[1]
    role.prepare_for_training()
    for _ in range(2):
        assert role.training_update(batch())["skipped"] == 0.0
    return role


def state(role):
    slices = role.run_state()["slices"]
    return {
        **{
            (name, kind): tensor.cpu().clone()
            for name, piece in slices.items()
            for kind, tensor in piece["tensors"].items()
        },
        **{(name, "model"): p.detach().cpu().clone() for name, p in role.gpt.named_parameters()},
    }


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert [key for key in left if not torch.equal(left[key], right[key])] == []


def size(role):
    return sum(parameter.numel() for parameter in role.gpt.parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_moments_leave_and_come_back(models, precision, allocated):
    role = trained(models, precision, offload_adam_states=True)
    kept, before = state(role), allocated()
    role.prepare_for_inference()
    if before is not None:
        assert before - allocated() == pytest.approx(8 * size(role), rel=0.02)
    role.get_logprobs(batch())
    role.finish_inference()
    role.prepare_for_training()
    assert_equal(state(role), kept)
    assert role.training_update(batch())["skipped"] == 0.0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_swapped_reference_leaves_the_policy(device, models, precision):
    role = build(MegatronGPTActorModel, models / "plain.nemo", precision=precision)
    initial = role.get_logprobs(batch())
    role.keep_reference("swap")
    role.loss_fn = ACTOR[1]
    role.prepare_for_training()
    role.training_update(batch())
    kept, learned = state(role), role.get_logprobs(batch())
    assert not torch.equal(learned, initial)
    for _ in range(2):
        assert torch.equal(role.get_reference_logprobs(batch()), initial)
        assert torch.equal(role.get_logprobs(batch()), learned)
    assert_equal(state(role), kept)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_parked_model_comes_back(device, models, precision, allocated):
    role = trained(models, precision)
    worker = RoleWorker(role, role.parallel)
    kept, before = state(role), allocated()
    worker.move_model(role.model, "cpu")
    if before is not None:
        leaving = size(role) * ((2 if precision == "bf16" else 4) + 4)  # weights, gradients
        assert before - allocated() == pytest.approx(leaving, rel=0.02)
    worker.move_model(role.model, device)
    assert_equal(state(role), kept)
    if before is not None:
        assert allocated() == pytest.approx(before, rel=0.01)
        assert all(float(p.main_grad.abs().sum()) == 0 for p in role.gpt.parameters())
    assert role.training_update(batch())["skipped"] == 0.0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_saved_state_is_loaded_and_goes_on(device, models, precision, tmp_path):
    first = trained(models, precision)
    save_worker_state(RoleWorker(first, first.parallel), str(tmp_path / "policy"))
    kept = state(first)
    expected = [first.training_update(batch()) for _ in range(2)]

    second = build(MegatronGPTActorModel, models / "plain.nemo", precision=precision)
    RoleWorker(second, second.parallel).load_state(str(tmp_path / "policy"))
    assert_equal(state(second), kept)
    second.loss_fn = ACTOR[1]
    second.prepare_for_training()
    found = [second.training_update(batch()) for _ in range(2)]
    if device == "cpu":
        assert found == expected
    else:  # sums of a GPU need not come in the same order twice
        print("continued to the bit:", found == expected)
        for left, right in zip(found, expected, strict=True):
            assert left == pytest.approx(right, rel=1e-3 if precision == "bf16" else 1e-5, abs=1e-5)
