"""Gradient buffers and float32 weights that are away between updates change no number.

Memory is parked by a copy on the CPU, as it would be on a GPU: what is read while it is away fails.
"""

import weakref

import pytest
import torch
from batches import ppo_batch
from role_models import assert_equal, load_role

from aligner.checkpoint.background import CopyMemory
from aligner.config import LengthParams, OptimConfig
from aligner.device import accelerator
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt import MegatronGPTActorModel
from aligner.models.gpt.role.training_state import ModelOffload

ROWS, LENGTH = 4, 12


def batch():
    return ppo_batch([LENGTH] * ROWS, [0] * ROWS, seed=2)


def load(tiny_nemo, **settings):
    settings |= {"micro_batch_size": 2, "global_batch_size": ROWS, "optim": OptimConfig(lr=1e-3)}
    settings["length_params"] = LengthParams(max_length=4)
    role = load_role(MegatronGPTActorModel, PPOPolicyLoss(), tiny_nemo, **settings)
    role.prepare_for_training()
    return role


def trained(tiny_nemo, precision, **settings):
    """Two updates with a rollout, scores and a run state between them."""
    role, data, seen = load(tiny_nemo, precision=precision, **settings), batch(), []
    for _ in range(2):
        role.prepare_for_training()
        seen.append(role.training_update(data))
        role.finish_training()
        role.prepare_for_inference()
        away = [each.main_grad.untyped_storage().nbytes() == 0 for each in role.gpt.parameters()]
        drawn = role.infer({"text": data["input_ids"][:, :4], "length": torch.full((ROWS,), 4)})
        seen += [drawn["response_tokens"], role.get_logprobs(data)]
        role.run_state()  # reads the float32 weights
    return [*seen, *role.whole_weights().values()], away


@pytest.mark.integration
@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_a_run_is_the_same_with_and_without(tiny_nemo, precision, monkeypatch):
    stays, away = trained(tiny_nemo, precision)
    assert not any(away)
    monkeypatch.setattr(accelerator, "is_apart", lambda tensor: True)
    goes, away = trained(tiny_nemo, precision, offload_gradients=True)
    assert all(away)
    assert_equal(stays, goes)


def tensors():
    generator = torch.Generator().manual_seed(3)
    floats = torch.randn(7, 5, generator=generator)
    return [floats, floats.T, floats.bfloat16(), torch.arange(3), torch.empty(0), torch.ones(())]


def test_copies_are_in_one_piece_of_memory_which_is_used_again():
    memory, given = CopyMemory(), tensors()
    copies = memory.copies(given)
    assert_equal(copies, given)
    assert memory.size == 192 + 192 + 128 + 64 + 64
    place, mapped = copies[0].data_ptr(), weakref.ref(memory._memory.obj)
    assert memory.copies([]) == []
    del copies
    later = memory.copies(given[:2])
    assert later[0].data_ptr() == place
    others = memory.copies([each + 1 for each in given[:2]])  # while the ones before are needed
    assert_equal(later, given[:2])
    assert_equal(others, [each + 1 for each in given[:2]])
    del later
    assert mapped() is None
    mapped = weakref.ref(memory._memory.obj)
    del memory
    assert torch.equal(others[0], given[0] + 1)
    del others
    assert mapped() is None


def test_what_is_parked_in_two_calls_comes_back(monkeypatch):
    monkeypatch.setattr(accelerator, "is_apart", lambda tensor: True)
    first, second, freed = (torch.full((9,), value) for value in (1.0, 2.0, 3.0))
    offload = ModelOffload(torch.nn.Module())
    for _ in range(2):
        offload.park(copied=[first, first[:4]], freed=[])
        offload.park(copied=[second, first], freed=[freed])
        assert not any(each.untyped_storage().nbytes() for each in (first, second, freed))
        offload.to_device()
        assert torch.equal(torch.stack([first, second, freed]).mean(1), torch.tensor([1.0, 2, 0]))


@pytest.mark.integration
def test_moments_come_back_bit_by_bit(tiny_nemo, monkeypatch):
    role = load(tiny_nemo)
    role.training_update(batch())
    optimizer = role.optimizer
    monkeypatch.setattr(accelerator, "is_apart", lambda tensor: True)
    states = list(optimizer.moment_states())
    before = [{key: value.clone() for key, value in state.items()} for state in states]
    optimizer.offload()
    size = optimizer._host_memory.size
    parameters = sum(each.numel() for each in role.gpt.parameters())
    assert 8 * parameters <= size < 8 * parameters + 128 * len(states)
    optimizer.restore()
    assert_equal(states, before)
