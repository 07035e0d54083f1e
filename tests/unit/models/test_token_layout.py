"""Frame to rows and back, and that a role's numbers do not depend on how its rows stand."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import ppo_batch
from role_models import gradients, load_role, trained

from aligner.architecture import RopeScaling
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.config import LoraConfig, OptimConfig, SamplingParams
from aligner.distributed.sequences import build_prefix_tree
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.losses.distillation import DistillationLoss
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.preference import DPOLoss
from aligner.losses.reward import BradleyTerryLoss
from aligner.losses.user import UserPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import MegatronGPTActorModel, MegatronGPTCriticModel, MegatronGPTRewardModel
from aligner.models.gpt.forward.token_layout import PADDING, LayoutRules, build_layout

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


ROWS, WIDTH = 8, 48


def plain_batch():
    batch = ppo_batch([16, 9, 33, 16, 5, 48, 2, 10], [4, 3, 6, 2, 1, 7, 1, 8])
    return {**batch, "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 0])}


def ready(name, path, **changes):
    role = load(name, path, **changes)
    role.prepare_for_training()
    return role


def loss_and_gradient(role, batch, mbs):
    role.optimizer.zero_grad()
    loss, _ = role.get_loss_and_metrics(batch, forward_only=False, mbs=mbs)
    return loss, gradients(role)


def assert_same_gradient(actual, expected, tolerance=1e-5):
    assert actual[0] == pytest.approx(expected[0], rel=tolerance, abs=1e-7)
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().clamp(min=1e-5)
        assert (gradient - actual[1][name]).abs().max() / scale < tolerance, name


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_loss_and_gradient_know_nothing_of_the_layout(name, tiny_nemo):
    padded, packed = ready(name, tiny_nemo), ready(name, tiny_nemo, sequence_packing=True)
    rounded = ready(name, tiny_nemo, sequence_length_round=16)
    batch = plain_batch()
    expected = loss_and_gradient(padded, batch, ROWS)
    assert max(gradient.abs().max() for gradient in expected[1].values()) > 1e-3
    order = torch.tensor([5, 0, 7, 2, 1, 6, 4, 3])
    shuffled = {key: value[order] for key, value in batch.items()}
    wider = {
        key: torch.nn.functional.pad(value, (0, 20), value=3) if value.dim() == 2 else value
        for key, value in batch.items()
    }
    wider["token_mask"][:, WIDTH:] = 0
    masked = batch["sample_mask"] == 0
    wider["advantages"][masked] = wider["returns"][masked] = 1e6
    for role in (padded, packed):
        for size in (1, 2, 4, 8):
            assert_same_gradient(loss_and_gradient(role, batch, size), expected)
        assert_same_gradient(loss_and_gradient(role, shuffled, 4), expected)
        assert_same_gradient(loss_and_gradient(role, wider, 2), expected)
        assert_same_gradient(
            loss_and_gradient(role, batch, [[0, 3], [3, 3], [3, 8], [8, 8]]), expected
        )
    assert_same_gradient(loss_and_gradient(rounded, batch, 2), expected)


@pytest.mark.parametrize("window", [None, 6])
def test_a_neighbour_changes_no_bit(window, tmp_path):
    path, architecture = tmp_path / "m.nemo", replace(TINY_ARCHITECTURE, window_size=window)
    save_nemo(path, random_weights(architecture, scale=0.1), architecture, {})
    actor, batch, row = ready("actor", path, sequence_packing=True), plain_batch(), 3
    before = actor.get_logprobs(batch, ROWS)
    changed = (batch["input_ids"] + 1) % 250
    changed[row] = batch["input_ids"][row]
    after = actor.get_logprobs({**batch, "input_ids": changed}, ROWS)
    assert torch.equal(before[row], after[row])
    assert (before - after).abs().max() > 1e-3


TOLERANCE = 1e-5


def test_a_row_stands_at_several_places_by_hand():
    ids = torch.tensor([[1, 2, 3, 0], [1, 2, 4, 5], [1, 2, 0, 0]])
    lengths = np.array([3, 4, 2])
    tree = build_prefix_tree(ids.numpy(), lengths, 1)
    layout = build_layout(ids, lengths, LayoutRules(False, 1, row_multiple=8), tree)
    assert layout.input_ids[0].tolist() == [1, 2, 3, 4, 5, 1, 1, 1]
    assert layout.positions[0].tolist() == [0, 1, 2, 2, 3, 0, 0, 0]
    assert (layout.frame_indices[5:] == PADDING).all()
    rows, tokens = layout.all_tokens()
    found = dict(zip(tokens.tolist(), rows.tolist(), strict=True))
    assert found == {0: 0, 1: 1, 2: 2, 4: 0, 5: 1, 6: 3, 7: 4, 8: 0, 9: 1}
    rows, tokens = layout.predicted_tokens(np.ones((3, 4), bool))
    found = dict(zip(tokens.tolist(), rows.tolist(), strict=True))
    assert found == {1: 0, 2: 1, 5: 0, 6: 1, 7: 3, 9: 0}


@pytest.mark.parametrize("size", [1, 2])
def test_every_place_is_held_by_one_rank(size):
    ids, lengths = forest()
    tree = build_prefix_tree(ids.numpy(), lengths, 32)
    places = []
    for rank in range(size):
        rules = LayoutRules(True, 2 * size if size > 1 else 1, 1, cp_rank=rank, cp_size=size)
        layout = build_layout(ids, lengths, rules, tree)
        rows, tokens = layout.all_tokens()
        assert (layout.input_ids[0, rows] == ids.flatten()[tokens]).all()
        assert (layout.positions[0, rows] == tokens % ids.shape[1]).all()
        places += tokens.tolist()
    inside = np.flatnonzero(np.arange(ids.shape[1]) < lengths[:, None])
    assert sorted(places) == inside.tolist()


OPTIM = OptimConfig(lr=1e-4, eps=1e-3)
ROLES = {
    "actor": (MegatronGPTActorModel, PPOPolicyLoss(entropy_bonus=0.01)),
    "critic": (MegatronGPTCriticModel, PPOValueLoss(value_clip=0.2)),
    "reward model": (MegatronGPTRewardModel, BradleyTerryLoss()),
    "pairs": (MegatronGPTActorModel, DPOLoss()),
    "student": (MegatronGPTActorModel, DistillationLoss()),
}


def forest(rows=8, width=90):
    """Two prompts with forks, a sequence that begins another, two that are equal, one alone."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 250, (rows, width), generator=generator)
    ids[:3, :40] = ids[0, :40]
    ids[1, 40:75] = ids[0, 40:75]
    ids[4:7, :50] = ids[4, :50]
    ids[5] = ids[4]
    lengths = torch.tensor([90, 80, 55, 30, 85, 85, 50, 12])
    return ids, lengths.numpy()


def make_batch(turns=False):
    """``turns``: many, with what an environment said between; rows part in a turn and in a hole."""
    ids, lengths = forest()
    prompts = [10, 10, 10, 3, 12, 12, 12, 1] if turns else [40, 40, 40, 3, 50, 50, 44, 1]
    batch = ppo_batch(lengths.tolist(), prompts, seed=6) | {"input_ids": ids}
    batch["sample_mask"] = torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 1])
    batch["ref_logprobs"] = torch.full(ids.shape, -5.0)
    if turns:
        position = torch.arange(ids.shape[1])
        in_turn = (batch["token_mask"] > 0) & (position % 13 >= 5)
        batch["turn_ids"] = torch.where(in_turn, position // 13 + 1, 0)
        batch["token_mask"] = in_turn.float()
    return batch


conversations = partial(make_batch, turns=True)


KEPT = 5  # most tokens of a recorded set


def recorded():
    """What a filter kept with each token, sets of each row's own; some were not recorded."""
    batch, generator = conversations(), torch.Generator().manual_seed(7)
    ids = batch["input_ids"]
    kept = torch.randint(0, 250, (*ids.shape, KEPT), generator=generator).int()
    kept[..., 0] = ids
    kept[..., 2:][torch.rand(ids.shape, generator=generator) < 0.5] = -1
    kept[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    batch["kept_ids"] = kept
    batch["prev_logprobs"] = torch.full(ids.shape, -1.5)
    return batch


FILTER = SamplingParams(top_p=0.9)


def load(name, path, loss=None, **settings):
    cls, own = ROLES[name]
    return load_role(cls, loss or own, path, optim=OPTIM, **settings)


def seen_of(name, path, mbs=4, rows=make_batch, **changes):
    role, batch = load(name, path, **changes), rows()
    role.prepare_for_inference()
    scores = role.infer_tokens(batch, mbs)
    if name == "student":
        batch["teacher_topk_logits"], batch["teacher_topk_indices"] = role.get_topk_logits(
            batch, 4, role.architecture.vocab_size, mbs
        )
    role.prepare_for_training()
    role.optimizer.zero_grad()
    role.get_loss_and_metrics(batch, False, mbs=mbs)
    gradient = gradients(role)
    reports = [role.training_update(batch, number, mbs=mbs) for number in range(2)]
    return {
        "scores": scores,
        **{f"report {n} {key}": torch.tensor(value) for n, report in enumerate(reports)
           for key, value in report.items()},
        **{f"gradient of {key}": value for key, value in gradient.items()},
        **{f"weight {key}": p.detach().clone() for key, p in trained(role)},
    }  # fmt: skip


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        # A number that terms of order 1 leave; the weights of an adapter, which begin at 0.
        least = {"report": 1e-2, "weight": 1e-3}.get(key.split()[0], 1e-5)
        if key == "gradient of rm_head.bias":  # the two rewards of a pair cancel
            least = 1e-2
        scale = value.abs().max().clamp(min=least)
        assert (actual[key] - value).abs().max() / scale < TOLERANCE, key


KINDS = {
    "dense": {},
    "learned positions": {"position_embedding": "learned_absolute", "max_position_embeddings": 90},
    "window": {"window_size": 45},
    "scaled rotary": {
        "rope_scaling": RopeScaling(4.0, original_max_position_embeddings=16),
        "rotary_percent": 0.5,
    },
    "experts": {"num_layers": 2, "num_moe_experts": 4, "moe_ffn_hidden_size": 64,
                "family": "mixtral"},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind, changes in KINDS.items():
        architecture = replace(TINY_ARCHITECTURE, **changes)
        weights = random_weights(architecture, scale=0.1)
        save_nemo(folder / f"{kind}.nemo", weights, architecture, {})
    return lambda kind: folder / f"{kind}.nemo"


CASES = [
    *((name, "dense") for name in ROLES if name != "actor"),
    *(("actor", kind) for kind in KINDS),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_numbers_are_those_of_separate_rows(name, kind, models):
    expected = seen_of(name, models(kind), shared_prefixes=False)
    assert_same(seen_of(name, models(kind)), expected)
    assert max(v.abs().max() for k, v in expected.items() if k.startswith("gradient")) > 1e-3


OWN = Path(__file__).parents[3] / "examples" / "extend" / "my_loss.py"
WAYS = {
    "packed": {"sequence_packing": True},
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective"},
    "one micro-batch": {"mbs": 8},
    "adapters that drop out": {"lora": LoraConfig(adapter_dim=4, adapter_dropout=0.5)},
    "a critic of conversations": {"name": "critic", "rows": conversations},
    "what a filter kept": {"rows": recorded, "sampling_params": FILTER},
    "a user's own loss": {
        "loss": UserPolicyLoss(f"{OWN}:ReinforceLoss", {"weight": 0.1}),
        "rows": conversations,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train(way, models):
    arguments = {"name": "actor", "path": models("dense"), **WAYS[way]}
    expected = seen_of(**arguments, shared_prefixes=False)
    assert_same(seen_of(**arguments), expected)


def test_equal_sequences_keep_sets_of_their_own(models):
    role, batch = load("actor", models("dense"), sampling_params=FILTER), recorded()
    assert torch.equal(batch["input_ids"][4], batch["input_ids"][5])
    scores = role.infer_tokens(batch, 4)
    assert (scores[4] - scores[5]).abs().max() > 0.1
    del batch["kept_ids"]
    scores = role.infer_tokens(batch, 4)
    torch.testing.assert_close(scores[4], scores[5])


def test_fewer_tokens_go_through_the_model(models):
    role, seen = load("actor", models("dense")), []
    role.gpt.decoder.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(out.shape[0] * out.shape[1]), with_kwargs=True
    )
    role.infer_tokens(make_batch(), 4)
    assert seen == [90 + 5 + 15 + 30, 85 + 12]


def test_where_nothing_is_shared_no_bit_changes(models):
    batch = make_batch()
    batch["input_ids"][:, 0] = torch.arange(8)
    scores = [
        load("actor", models("dense"), shared_prefixes=shared).infer_tokens(batch, 4)
        for shared in (False, True)
    ]
    assert torch.equal(*scores)


def test_a_model_with_dropout_shares_nothing(models):
    for dropout, shares in ((0.0, True), (0.1, False), (None, True)):
        assert load("actor", models("dense"), dropout=dropout).shares_prefixes is shares
    assert not load("actor", models("dense"), shared_prefixes=False).shares_prefixes
