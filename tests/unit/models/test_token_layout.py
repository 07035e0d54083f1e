"""Frame to rows and back, and that a role's numbers do not depend on how its rows stand.

1. By hand: which row holds which token, and which token it predicts, on every rank.
2. Loss and gradient under micro-batch size, order, padding, packing, micro-batches without rows.
3. Models with learned positions, rotary scaling and a sliding window; recomputed activations.
4. A neighbour in the packed row changes no log-prob.
"""

import dataclasses

import numpy as np
import pytest
import torch
from batches import ppo_batch
from role_models import gradients, load_role

from aligner.architecture import RopeScaling
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.config import OptimConfig
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import (
    MegatronGPTActorModel,
    MegatronGPTCriticModel,
    MegatronGPTRewardModel,
    load_from_nemo,
)
from aligner.models.gpt.forward.token_layout import PADDING, LayoutRules, build_layout
from aligner.models.gpt.role.settings import RoleSettings

pytestmark = pytest.mark.integration

IDS = torch.tensor([[10, 11, 12, 0, 0], [20, 21, 22, 23, 24], [30, 0, 0, 0, 0]])
LENGTHS = np.array([3, 5, 1])


def rules(packed=True, sequence_multiple=1, row_multiple=1, **context):
    return LayoutRules(packed, sequence_multiple, row_multiple, **context)


def test_packed_rows_by_hand():
    layout = build_layout(IDS, LENGTHS, rules(row_multiple=4))
    assert layout.input_ids[0, :9].tolist() == [10, 11, 12, 20, 21, 22, 23, 24, 30]
    assert layout.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 0, 0]
    assert layout.frame_indices.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10, *[PADDING] * 3]
    rows, tokens = layout.predicted_tokens()
    assert rows.tolist() == [0, 1, 3, 4, 5, 6]
    assert tokens.tolist() == [1, 2, 6, 7, 8, 9]
    frame = layout.to_frame(torch.arange(1.0, 7.0), tokens)
    assert frame.tolist() == [[0, 1, 2, 0, 0], [0, 3, 4, 5, 6], [0] * 5]


def test_padded_rows_by_hand():
    layout = build_layout(IDS, LENGTHS, rules(packed=False, row_multiple=4))
    assert layout.input_ids.shape == (3, 8)
    assert layout.positions[1].tolist() == [0, 1, 2, 3, 4, 4, 4, 4]  # a table may end there
    assert layout.all_tokens()[0].tolist() == [0, 1, 2, 8, 9, 10, 11, 12, 16]
    assert layout.all_tokens()[1].tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10]
    assert layout.predicted_tokens()[1].tolist() == [1, 2, 6, 7, 8, 9]


def test_two_ranks_share_every_sequence_by_hand():
    first, second = (
        build_layout(IDS, LENGTHS, rules(sequence_multiple=4, cp_rank=rank, cp_size=2))
        for rank in range(2)
    )
    # Sequences padded to 4, 8 and 4: chunks of 1, 2 and 1.
    assert first.frame_indices.tolist() == [0, -1, 5, 6, -1, -1, 10, -1]
    assert second.frame_indices.tolist() == [1, 2, 7, 8, 9, -1, -1, -1]
    assert second.positions[0].tolist() == [1, 2, 2, 3, 4, 4, 1, 2]
    # Token 7 (23 at position 2 of the second sequence) is predicted by the rank that holds 6.
    assert first.predicted_tokens()[1].tolist() == [1, 6, 7]
    assert second.predicted_tokens()[1].tolist() == [2, 8, 9]


def test_no_sequence_at_all():
    for packed in (True, False):
        layout = build_layout(IDS[:0], LENGTHS[:0], rules(packed, row_multiple=2))
        assert layout.input_ids.shape == (1, 2)
        rows, tokens = layout.predicted_tokens()
        assert rows.numel() == tokens.numel() == 0
        assert layout.to_frame(torch.zeros(0), tokens).shape == (0, 5)


# Roles ----------------------------------------------------------------------------------------

ROWS, WIDTH = 8, 48
OPTIM = OptimConfig(lr=1e-3)
ROLES = {
    "actor": (MegatronGPTActorModel, PPOPolicyLoss(entropy_bonus=0.01)),
    "critic": (MegatronGPTCriticModel, PPOValueLoss(value_clip=0.2)),
}


def make_batch():
    batch = ppo_batch([16, 9, 33, 16, 5, 48, 2, 10], [4, 3, 6, 2, 1, 7, 1, 8])
    return {**batch, "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 0])}


def load(name, path, **changes):
    role = load_role(*ROLES[name], path, optim=OPTIM, **changes)
    role.prepare_for_training()
    return role


def loss_and_gradient(role, batch, mbs):
    role.optimizer.zero_grad()
    loss, _ = role.get_loss_and_metrics(batch, forward_only=False, mbs=mbs)
    return loss, gradients(role)


def assert_same(actual, expected, tolerance=1e-5):
    assert actual[0] == pytest.approx(expected[0], rel=tolerance, abs=1e-7)
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().clamp(min=1e-5)
        assert (gradient - actual[1][name]).abs().max() / scale < tolerance, name


@pytest.mark.parametrize("name", ROLES)
def test_loss_and_gradient_know_nothing_of_the_layout(name, tiny_nemo):
    padded, packed = load(name, tiny_nemo), load(name, tiny_nemo, sequence_packing=True)
    rounded = load(name, tiny_nemo, sequence_length_round=16)
    batch = make_batch()
    expected = loss_and_gradient(padded, batch, ROWS)
    assert max(gradient.abs().max() for gradient in expected[1].values()) > 1e-3
    order = torch.tensor([5, 0, 7, 2, 1, 6, 4, 3])
    shuffled = {key: value[order] for key, value in batch.items()}
    wider = {
        key: torch.nn.functional.pad(value, (0, 20), value=3) if value.dim() == 2 else value
        for key, value in batch.items()
    }
    wider["token_mask"][:, WIDTH:] = 0
    for role in (padded, packed):
        for size in (1, 2, 4, 8):
            assert_same(loss_and_gradient(role, batch, size), expected)
        assert_same(loss_and_gradient(role, shuffled, 4), expected)
        assert_same(loss_and_gradient(role, wider, 2), expected)
        assert_same(loss_and_gradient(role, batch, [[0, 3], [3, 3], [3, 8], [8, 8]]), expected)
    assert_same(loss_and_gradient(rounded, batch, 2), expected)


def test_recomputed_packed_activations_give_the_same_gradient(tiny_nemo):
    expected = loss_and_gradient(load("actor", tiny_nemo), make_batch(), 4)
    for recompute in ("full", "selective"):
        role = load("actor", tiny_nemo, sequence_packing=True, recompute=recompute)
        assert_same(loss_and_gradient(role, make_batch(), 4), expected)


KINDS = {
    "learned positions": {"position_embedding": "learned_absolute", "max_position_embeddings": 48},
    "window": {"window_size": 6},
    "scaled rotary": {
        "rope_scaling": RopeScaling(4.0, original_max_position_embeddings=16),
        "rotary_percent": 0.5,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(kind, tmp_path):
    architecture = dataclasses.replace(TINY_ARCHITECTURE, **KINDS[kind])
    path = tmp_path / "model.nemo"
    save_nemo(path, random_weights(architecture, scale=0.1), architecture, {})
    expected = loss_and_gradient(load("actor", path), make_batch(), 4)
    packed = load("actor", path, sequence_packing=True)
    assert_same(loss_and_gradient(packed, make_batch(), 4), expected)


def test_a_neighbour_changes_nothing(tiny_nemo):
    actor = load("actor", tiny_nemo, sequence_packing=True)
    batch = make_batch()
    before = actor.get_logprobs(batch, ROWS)
    row = 3
    changed = (batch["input_ids"] + 1) % 250
    changed[row] = batch["input_ids"][row]
    after = actor.get_logprobs({**batch, "input_ids": changed}, ROWS)
    assert torch.equal(before[row], after[row])
    assert (before - after).abs().max() > 1e-3


def test_rewards_of_packed_sequences(tiny_nemo):
    rewards = []
    for packed in (False, True):
        settings = RoleSettings(sequence_packing=packed, forward_micro_batch_size=3)
        role = load_from_nemo(MegatronGPTRewardModel, settings, restore_path=tiny_nemo)
        with torch.no_grad():
            role.gpt.rm_head.weight.normal_(generator=torch.Generator().manual_seed(3))
        rewards.append(role.infer_rm_critic(make_batch())["rewards"])
    assert torch.allclose(*rewards, atol=1e-5)
    assert rewards[0].abs().min() > 0
