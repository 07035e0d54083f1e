"""Sequences that share prefixes go through the model as if each stood for itself.

1. Attention over a tree: values and gradients of each sequence alone, in float64; windows, grouped
   queries, context-parallel ranks, and the runs that a GPU's kernel is given.
2. By hand: which row stands at which places.
3. Scores, losses, gradients and two updates of every role, on every kind of model.
4. Where nothing is shared no bit changes; where dropout would differ nothing is shared.
5. Planned micro-batches hold what belongs together, and count its tokens once.
"""

import dataclasses

import numpy as np
import pytest
import torch

from aligner.architecture import RopeScaling
from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.batches.prefix_tree import build_prefix_tree, shared_prefixes
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.checkpoint.tiny import TINY_ARCHITECTURE, random_weights
from aligner.cluster.worker_groups import LocalCluster
from aligner.config import (
    DynamicBatchingConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    SequencePackingConfig,
)
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.parallel import initialize_parallel
from aligner.losses.distillation import DistillationLoss
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.preference import DPOLoss
from aligner.losses.reward import BradleyTerryLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import (
    MegatronGPTActorModel,
    MegatronGPTCriticModel,
    MegatronGPTRewardModel,
    load_from_nemo,
)
from aligner.models.gpt.forward.token_layout import PADDING, LayoutRules, build_layout
from aligner.models.gpt.layers.attention import SegmentParams
from aligner.models.gpt.megatron.build import build_gpt
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.policy.lm_policy import Policy

TOLERANCE = 1e-5

# Forks of forks, a sequence that begins another one, equal ones, one by itself.
PARENTS = np.array([-1, 0, 1, 1, 0, 4, 4, 4, -1])
TOKENS = np.array([20, 33, 7, 40, 5, 1, 2, 64, 9])


# Attention ----------------------------------------------------------------------------------------

HEADS, GROUPS, WIDTH = 6, 2, 8


@pytest.fixture(scope="module")
def core():
    initialize_parallel()
    return build_gpt(TINY_ARCHITECTURE).decoder.layers[0].self_attention.core_attention.eval()


@pytest.fixture(params=[None, 30], ids=["full", "window 30"])
def windowed(core, request, monkeypatch):
    monkeypatch.setattr(core, "window", request.param)
    return core


def qkv(rows):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(rows, heads, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    )


def path_of(run):
    """Rows of the tokens up to the end of a run, where runs stand one after the other."""
    starts = np.cumsum(TOKENS) - TOKENS
    path = np.arange(starts[run], starts[run] + TOKENS[run])
    return path if PARENTS[run] < 0 else np.concatenate([path_of(PARENTS[run]), path])


def written_out(query, key, value, window):
    """Every run by the formula: its queries against all keys of its path."""
    outputs = []
    for run, tokens in enumerate(TOKENS):
        path = torch.from_numpy(path_of(run))
        q = query[path[-tokens:]]
        k, v = (each[path].repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
        distance = torch.arange(len(path))[-tokens:, None] - torch.arange(len(path))
        seen = (distance >= 0) & (distance < (window or len(path)))
        scores = torch.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def attended(core, query, key, value, padded, num_rows, **context):
    from aligner.models.gpt.layers.segments import build_segments

    segments = build_segments(
        padded, num_rows, torch.device("cpu"), parents=PARENTS, tokens=TOKENS, **context
    )
    out = core(query[:, None], key[:, None], value[:, None],
               packed_seq_params=SegmentParams(segments=segments))  # fmt: skip
    return out[:, 0].unflatten(-1, (HEADS, WIDTH))


def test_attention_over_a_tree_is_that_of_each_path(windowed, monkeypatch):
    monkeypatch.setattr(windowed, "scale", WIDTH**-0.5)
    rows = int(TOKENS.sum())
    inputs = qkv(rows + 2)
    out = attended(windowed, *inputs, TOKENS, rows + 2)
    expected = written_out(*(each[:rows] for each in inputs), windowed.window)
    assert (out[:rows] - expected).abs().max() < 1e-7  # its exponential is not to the last bit
    assert out[rows:].abs().sum() == 0
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    actual = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight[:rows]).sum(), inputs)
    for left, right in zip(actual, wanted, strict=True):
        assert (left - right).abs().max() < 1e-6


def shared_out(rank, size):
    """Padded lengths, and the rows of whole runs (-1: padding) that a rank holds, in its order."""
    from aligner.distributed.context_parallel import local_position

    padded = -(-TOKENS // (2 * size)) * 2 * size
    starts, rows = np.cumsum(TOKENS) - TOKENS, []
    for start, tokens, length in zip(starts, TOKENS, padded, strict=True):
        position = local_position(np.arange(length // size), length // (2 * size), rank, size)
        rows.append(np.where(position < tokens, start + position, -1))
    return padded, np.concatenate(rows)


@pytest.mark.parametrize("varlen", [False, True], ids=["buckets", "runs"])
def test_context_parallel_ranks_hold_parts_of_every_run(windowed, varlen, monkeypatch):
    from aligner.models.gpt.layers import attention

    monkeypatch.setattr(windowed, "scale", WIDTH**-0.5)
    size, inputs = 2, qkv(int(TOKENS.sum()))
    expected = written_out(*inputs, windowed.window)
    held = [shared_out(rank, size)[1] for rank in range(size)]
    gathered = np.concatenate(held)
    query, key, value = (each[torch.from_numpy(gathered.clip(0))] for each in inputs)
    local = len(held[0])
    if varlen:
        monkeypatch.setattr(attention, "can_attend_varlen", lambda *_: True)
        monkeypatch.setattr(attention, "attend_varlen", by_runs)
    for rank in range(size):
        part = slice(rank * local, (rank + 1) * local)
        out = attended(
            windowed, query[part], key, value, shared_out(rank, size)[0], local,
            cp_rank=rank, cp_size=size,
        )  # fmt: skip
        real = held[rank] >= 0
        assert (out[real] - expected[held[rank][real]]).abs().max() < 1e-7


def by_runs(query, key, value, segments, scale, window):
    """What a GPU's kernel computes of the runs: pairs that are aligned at their ends."""
    runs, outputs = segments.runs, []
    for i in range(len(runs.queries)):
        q = query[runs.query_ends[i] : runs.query_ends[i + 1]]
        at = runs.key_rows[runs.key_ends[i] : runs.key_ends[i + 1]]
        k, v = (each[at].repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
        distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        seen = (distance >= 0) & (distance < (window or len(k)))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        outputs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        )
    return torch.cat(outputs)


# Layout -------------------------------------------------------------------------------------------


def test_a_row_stands_at_several_places_by_hand():
    ids = torch.tensor([[1, 2, 3, 0], [1, 2, 4, 5], [1, 2, 0, 0]])
    lengths = np.array([3, 4, 2])
    tree = build_prefix_tree(ids.numpy(), lengths, 1)
    layout = build_layout(ids, lengths, LayoutRules(False, 1, row_multiple=8), tree)
    assert layout.input_ids[0].tolist() == [1, 2, 3, 4, 5, 1, 1, 1]
    assert layout.positions[0].tolist() == [0, 1, 2, 2, 3, 0, 0, 0]
    assert (layout.held[5:] == PADDING).all()
    rows, tokens = layout.held_tokens()
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
        rows, tokens = layout.held_tokens()
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


def load(name, path, **changes):
    role = load_from_nemo(ROLES[name][0], RoleSettings(optim=OPTIM, **changes), restore_path=path)
    if hasattr(role.gpt, "rm_head"):
        with torch.no_grad():
            role.gpt.rm_head.weight.normal_(generator=torch.Generator().manual_seed(3))
    role.setup_training()
    role.loss_fn = ROLES[name][1]
    return role


def seen_of(name, path, mbs=4, **changes):
    """Scores, what two updates report, the first one's gradient, and the weights after them."""
    role, batch = load(name, path, **changes), make_batch()
    role.prepare_for_inference()
    scores = role.infer_tokens(batch, mbs)
    if name == "student":
        batch["teacher_topk_logits"], batch["teacher_topk_indices"] = role.get_topk_logits(
            batch, 4, role.architecture.vocab_size, mbs
        )
    role.prepare_for_training()
    role.optimizer.zero_grad()
    role.get_loss_and_metrics(batch, False, mbs=mbs)
    gradient = {name: p.main_grad.clone() for name, p in trained(role)}
    reports = [role.training_update(batch, number, mbs=mbs) for number in range(2)]
    return {
        "scores": scores,
        **{f"report {n} {key}": torch.tensor(value) for n, report in enumerate(reports)
           for key, value in report.items()},
        **{f"gradient of {key}": value for key, value in gradient.items()},
        **{f"weight {key}": p.detach().clone() for key, p in trained(role)},
    }  # fmt: skip


def trained(role):
    return [(name, p) for name, p in role.gpt.named_parameters() if p.requires_grad]


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        # A number that terms of order 1 leave; the weights of an adapter, which begin at 0.
        least = {"report": 1e-2, "weight": 1e-3}.get(key.split()[0], 1e-5)
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


WAYS = {
    "packed": {"sequence_packing": True},
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective"},
    "one micro-batch": {"mbs": 8},
    "adapters that drop out": {"lora": LoraConfig(adapter_dim=4, adapter_dropout=0.5)},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train(way, models):
    expected = seen_of("actor", models("dense"), shared_prefixes=False, **WAYS[way])
    assert_same(seen_of("actor", models("dense"), **WAYS[way]), expected)


def test_fewer_tokens_go_through_the_model(models):
    role, seen = load("actor", models("dense")), []
    hook = role.gpt.decoder.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(out.shape[0] * out.shape[1]),
        with_kwargs=True,
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
            restore_from_path=str(models("dense")), global_batch_size=8, optim=OPTIM, **changes
        )
        cluster = LocalCluster(initialize_parallel())
        policy = Policy(cluster, config, byte_level_tokenizer(), init_reference_model=False)
        batch = BatchedDataDict(make_batch())
        scores = policy.get_logprobs(batch)["logprobs"]
        policy.prepare_for_training()
        reports = [policy.train(batch, PPOPolicyLoss()) for _ in range(2)]
        numbers = [[report["loss"], report["grad_norm"]] for report in reports]
        found.append({"scores": scores, "report": torch.tensor(numbers)})
    assert_same(*found)


# Micro-batches ------------------------------------------------------------------------------------


def rollout(groups=6, rows=4, prompt=64, response=16):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 250, (groups * rows, prompt + response), generator=generator)
    ids[:, :prompt] = ids[::rows, :prompt].repeat_interleave(rows, 0)
    lengths = torch.full((groups * rows,), prompt + response)
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


def arguments(mode, **changes):
    common = {
        "max_tokens_per_microbatch": 300,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "shared_prefixes": True,
        **changes,
    }
    if mode == "dynamic":
        return {"dynamic_batching_args": {**common, "sequence_length_round": 4}}
    rest = {"algorithm": "first_fit_decreasing", "sequence_length_pad_multiple": 4}
    return {"sequence_packing_args": {**common, **rest}}


def micro_batches(shard):
    for number in range(len(shard.elem_counts_per_gb)):
        part = shard.get_batch(number)
        for start, end in part.micro_batch_indices[0]:
            yield part.slice(start, end)


@pytest.mark.parametrize("mode", ["dynamic", "packed"])
@pytest.mark.parametrize("shards", [1, 2])
def test_planned_micro_batches_hold_whole_groups(mode, shards):
    batch = rollout()
    parts, order = batch.shard_by_batch_size(shards, 12, **arguments(mode))
    assert sorted(order) == list(range(24))
    assert len({len(shard.micro_batch_indices[0]) for shard in parts}) == 1
    passes = [each for shard in parts for each in micro_batches(shard) if each.size]
    assert len(passes) == 4 if shards == 1 else len(passes) <= 6
    for each in passes:
        tree = shared_prefixes(each["input_ids"].numpy(), each["input_lengths"].numpy())
        assert tree is not None
        assert tree.num_tokens() <= 300


@pytest.mark.parametrize("mode", ["dynamic", "packed"])
def test_a_plan_without_shared_prefixes_is_the_same(mode):
    batch = rollout(prompt=8)
    plans = []
    for shared in (True, False):
        parts, order = batch.shard_by_batch_size(2, 12, **arguments(mode, shared_prefixes=shared))
        plans.append((order, [part.micro_batch_indices for part in parts]))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("mode", ["dynamic", "packed"])
def test_what_shares_nothing_is_planned_beside_what_does(mode):
    batch = rollout(groups=5)
    batch["input_ids"][4:11] = torch.randint(0, 250, (7, 80))
    parts, order = batch.shard_by_batch_size(1, **arguments(mode))
    assert sorted(order) == list(range(20))
    for each in micro_batches(parts[0]):
        tree = shared_prefixes(each["input_ids"].numpy(), each["input_lengths"].numpy())
        tokens = int(each["input_lengths"].sum()) if tree is None else tree.num_tokens()
        assert tokens <= 300
