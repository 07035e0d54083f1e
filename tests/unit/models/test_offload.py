"""Gradient buffers and float32 weights that are away between updates change no number.

Memory is parked by a copy on the CPU, as it would be on a GPU: what is read while it is away fails.
"""

import weakref

import pytest
import torch
from batches import ppo_batch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_scale

from aligner.checkpoint.background import CopyMemory
from aligner.config import LengthParams, OptimConfig
from aligner.device import accelerator
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.gpt.role.training_state import ModelOffload, SwappedWeights

ROWS, LENGTH = 4, 12


def batch():
    return ppo_batch([LENGTH] * ROWS, [0] * ROWS, seed=2)


def trained(tiny_nemo, precision, **settings):
    """Two updates with a rollout, scores and a run state between them."""
    role = load_from_nemo(
        MegatronGPTActorModel,
        RoleSettings(
            precision=precision,
            optim=OptimConfig(lr=1e-3),
            micro_batch_size=2,
            global_batch_size=ROWS,
            length_params=LengthParams(max_length=4),
            **settings,
        ),
        restore_path=str(tiny_nemo),
    )
    role.loss_fn, data, seen = PPOPolicyLoss(), batch(), []
    for _ in range(2):
        role.prepare_for_training()
        seen.append(role.training_update(data))
        role.finish_training()
        role.prepare_for_inference()
        away = [each.main_grad.untyped_storage().nbytes() == 0 for each in role.gpt.parameters()]
        drawn = role.infer({"text": data["input_ids"][:, :4], "length": torch.full((ROWS,), 4)})
        seen += [drawn["response_tokens"], role.get_logprobs(data)]
        role.run_state()  # reads the float32 weights
    weights = {name: tensor.clone() for name, tensor in role.whole_weights().items()}
    return seen, weights, away


@pytest.mark.integration
@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_a_run_is_the_same_with_and_without(tiny_nemo, precision, monkeypatch):
    stays, weights, away = trained(tiny_nemo, precision)
    assert not any(away)
    monkeypatch.setattr(accelerator, "is_apart", lambda tensor: True)
    goes, same, away = trained(tiny_nemo, precision, offload_gradients=True)
    assert all(away)
    for one, other in zip(stays, goes, strict=True):
        if isinstance(one, dict):
            assert one == other
        else:
            assert torch.equal(one, other)
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def tensors():
    """Of several dtypes and shapes, one of them not contiguous and one empty."""
    generator = torch.Generator().manual_seed(3)
    floats = torch.randn(7, 5, generator=generator)
    return [floats, floats.T, floats.bfloat16(), torch.arange(3), torch.empty(0), torch.ones(())]


def test_copies_are_in_one_piece_of_memory_which_is_used_again():
    memory, given = CopyMemory(), tensors()
    copies = memory.copies(given)
    assert all(torch.equal(*pair) for pair in zip(copies, given, strict=True))
    assert memory.size == 192 + 192 + 128 + 64 + 64
    place, mapped = copies[0].data_ptr(), weakref.ref(memory._memory.obj)
    assert memory.copies([]) == []
    del copies
    later = memory.copies(given[:2])
    assert later[0].data_ptr() == place
    others = memory.copies([each + 1 for each in given[:2]])  # while the ones before are needed
    assert all(torch.equal(*pair) for pair in zip(later, given, strict=False))
    assert torch.equal(others[0], given[0] + 1)
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
    role = load_from_nemo(
        MegatronGPTActorModel,
        RoleSettings(optim=OptimConfig(lr=1e-3), micro_batch_size=2, global_batch_size=ROWS),
        restore_path=str(tiny_nemo),
    )
    role.loss_fn = PPOPolicyLoss()
    role.prepare_for_training()
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
    for state, saved in zip(states, before, strict=True):
        assert all(torch.equal(state[key], value) for key, value in saved.items())


def test_weights_are_exchanged_bit_by_bit():
    given = [each.clone() for each in tensors()]
    swapped = SwappedWeights({str(number): each for number, each in enumerate(given)})
    for each in given:
        each.add_(1)
    after = [each.clone() for each in given]
    with swapped.in_place():
        assert all(torch.equal(*pair) for pair in zip(given, tensors(), strict=True))
    assert all(torch.equal(*pair) for pair in zip(given, after, strict=True))


def test_gradients_are_clipped_where_they_are():
    accelerator.prepare_megatron()
    generator = torch.Generator().manual_seed(4)
    ours = [torch.randn(n, generator=generator) * 1e3 for n in (1, 33, 4097)]
    theirs, places = [each.clone() for each in ours], [each.data_ptr() for each in ours]
    local_multi_tensor_scale(1, None, [theirs, theirs], 0.1234567)
    assert clip_grads.multi_tensor_scale_impl is not local_multi_tensor_scale
    clip_grads.multi_tensor_scale_impl(1, None, [ours, ours], 0.1234567)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert places == [each.data_ptr() for each in ours]
    clip_grads.multi_tensor_scale_impl(1, None, [[], []], 0.5)
