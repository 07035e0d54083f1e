"""Gradient buffers and float32 weights that are away between updates change no number.

Memory is parked by a copy on the CPU, as it would be on a GPU: what is read while it is away fails.
"""

import pytest
import torch

from aligner.config import LengthParams, OptimConfig
from aligner.distributed import accelerator
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings

ROWS, LENGTH = 4, 12


def batch():
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(ROWS, LENGTH, generator=generator)
    return {
        "input_ids": torch.randint(0, 256, (ROWS, LENGTH), generator=generator),
        "input_lengths": torch.full((ROWS,), LENGTH),
        "token_mask": torch.ones(ROWS, LENGTH),
        "sample_mask": torch.ones(ROWS),
        "advantages": noise,
        "prev_logprobs": torch.full_like(noise, -5.5),
        "generation_logprobs": torch.full_like(noise, -5.5),
    }


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


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_a_run_is_the_same_with_and_without(tiny_nemo, precision, monkeypatch):
    stays, weights, away = trained(tiny_nemo, precision)
    assert not any(away)
    monkeypatch.setattr(accelerator, "to_host", lambda tensor: tensor.clone())
    goes, same, away = trained(tiny_nemo, precision, offload_gradients=True)
    assert all(away)
    for one, other in zip(stays, goes, strict=True):
        if isinstance(one, dict):
            assert one == other
        else:
            assert torch.equal(one, other)
    assert all(torch.equal(weights[name], same[name]) for name in weights)
