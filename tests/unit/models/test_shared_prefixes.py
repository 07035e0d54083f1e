"""Sequences that share prefixes go through the model as if each stood for itself.

1. By hand: which row stands at which places.
2. Scores, losses, gradients and two updates of every role, on every kind of model, on every kind of
   rows: conversations, recorded sets of what a filter kept; and with a user's own loss.
3. Where nothing is shared no bit changes; where dropout would differ nothing is shared.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from role_models import gradients, load_role, trained

from aligner.architecture import RopeScaling
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.config import (
    DynamicBatchingConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PolicyPPOConfig,
    SamplingParams,
    SequencePackingConfig,
)
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.sequences import build_prefix_tree
from aligner.distributed.workers import LocalCluster
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.losses.distillation import DistillationLoss
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.preference import DPOLoss
from aligner.losses.reward import BradleyTerryLoss
from aligner.losses.user import UserPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import MegatronGPTActorModel, MegatronGPTCriticModel, MegatronGPTRewardModel
from aligner.models.gpt.forward.token_layout import PADDING, LayoutRules, build_layout
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

TOLERANCE = 1e-5

# Layout -------------------------------------------------------------------------------------------


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


# Roles --------------------------------------------------------------------------------------------

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


def make_batch():
    generator = torch.Generator().manual_seed(6)
    ids, lengths = forest()
    lengths = torch.from_numpy(lengths)
    prompts = torch.tensor([40, 40, 40, 3, 50, 50, 44, 1])
    position = torch.arange(ids.shape[1])
    mask = (position >= prompts[:, None]) & (position < lengths[:, None])
    noise = torch.randn(ids.shape, generator=generator)
    return {
        "input_ids": ids,
        "ref_logprobs": torch.full_like(noise, -5.0),
        "input_lengths": lengths,
        "token_mask": mask.float(),
        "sample_mask": torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 1]),
        "advantages": noise,
        "returns": noise.flip(0),
        "values": torch.zeros_like(noise),
        "prev_logprobs": torch.full_like(noise, -5.5),
    }


def conversations():
    """Many turns with what an environment said between; rows part in a turn and in a hole."""
    batch = make_batch()
    prompts = torch.tensor([10, 10, 10, 3, 12, 12, 12, 1])
    position = torch.arange(batch["input_ids"].shape[1])
    inside = (position >= prompts[:, None]) & (position < batch["input_lengths"][:, None])
    batch["turn_ids"] = torch.where(inside & (position % 13 >= 5), position // 13 + 1, 0)
    batch["token_mask"] = (batch["turn_ids"] > 0).float()
    return batch


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
    """Scores, what two updates report, the first one's gradient, and the weights after them."""
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
        architecture = dataclasses.replace(TINY_ARCHITECTURE, **changes)
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
    "conversations": {"rows": conversations},
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
    hook = role.gpt.decoder.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(out.shape[0] * out.shape[1]), with_kwargs=True
    )
    role.infer_tokens(make_batch(), 4)
    hook.remove()
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


PLANS = {
    "packed": {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=256)},
    "dynamic": {"dynamic_batching": DynamicBatchingConfig(enabled=True, train_mb_tokens=256)},
}


@pytest.mark.parametrize("plan", PLANS)
def test_planned_training_is_that_of_separate_rows(plan, models):
    found = []
    for changes in ({"shared_prefixes": False}, PLANS[plan]):
        config = ModelConfig(
            restore_from_path=str(models("dense")),
            global_batch_size=8,
            optim=OPTIM,
            ppo=PolicyPPOConfig(sampling_params=FILTER),
            **changes,
        )
        cluster = LocalCluster(initialize_parallel())
        policy = Policy(cluster, config, byte_level_tokenizer(), init_reference_model=False)
        batch = BatchedDataDict(recorded())
        scores = policy.get_logprobs(batch)["logprobs"]
        policy.prepare_for_training()
        reports = [policy.train(batch, PPOPolicyLoss()) for _ in range(2)]
        numbers = [[report["loss"], report["grad_norm"]] for report in reports]
        found.append({"scores": scores, "report": torch.tensor(numbers)})
    assert_same(*found)
