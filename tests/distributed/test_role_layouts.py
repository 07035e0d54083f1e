"""Actor and critic in every layout give one process's numbers, forward and after two updates.

Answers, loss, gradient norm, responses drawn, answers after two updates and the weights of the
`.nemo` that the layout writes: with recomputed activations, critics that train on the pass of their
values, mixtures of experts, unequal pipeline stages, frozen routers, and of every family.

A layout is ``tensor,pipeline,expert,recompute``, with sequence parallelism where tensor is more
than 1; what is left of the world is data parallel. With ``,whole`` after it an update is one
micro-batch, which the critic values first, as PPO does. With ``,overlap`` gradients are summed and
weights collected in the background, in buckets of few layers; with ``,uneven`` the first pipeline
stage has two layers; with ``,frozen`` routers of experts are not trained.
"""

import dataclasses
import functools
import os

import pytest
import torch
from batches import ppo_batch
from hf_models import CASES as FAMILIES
from hf_models import save_random_model
from megatron.core.distributed import DistributedDataParallelConfig
from ranks import on_ranks
from role_models import load_role

from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.config import LengthParams, OptimConfig, ParallelConfig, SamplingParams
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import MegatronGPTActorModel, MegatronGPTCriticModel, load_from_nemo
from aligner.models.gpt.decode.generator import Generator
from aligner.models.gpt.megatron import optimizer
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.collectives import gather_objects

ROWS = 8
SMALL = dataclasses.replace(
    TINY_ARCHITECTURE, num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2
)
EXPERTS = dataclasses.replace(SMALL, num_moe_experts=4, moe_ffn_hidden_size=24, family="mixtral")
MODELS = {
    "dense": SMALL,
    "tied": dataclasses.replace(SMALL, tie_embeddings=True),
    "experts": EXPERTS,
    "three layers": dataclasses.replace(EXPERTS, num_layers=3),
    "thirds": dataclasses.replace(
        SMALL, hidden_size=36, num_attention_heads=9, num_query_groups=3, ffn_hidden_size=48
    ),
}
ONE, FROZEN, WHOLE = "1,1,1,none", "1,1,1,none,frozen", "1,1,1,none,whole"
KEPT = [WHOLE, "2,1,1,none,whole", "2,1,1,full,whole"]
NOT_KEPT = "1,2,1,none,whole"  # pipeline stages have a graph each
# Families that compute in a way of their own, and others.
OWN = (
    *("starcoder2", "phi4_mini", "smollm3_biases", "olmo2", "granite", "gemma2", "gemma3"),
    *("qwen2_moe", "glm4_moe", "deepseek_v3", "gpt_oss"),
)
SPLIT = {"gpt_oss": "2,1,2,none,whole"}  # megatron-core does not split experts with biases
OTHERS = (
    *("nemotron", "stablelm_biases", "seed_oss", "arcee", "glm", "ernie4_5_biases", "helium"),
    *("glm4", "olmo3_yarn", "gemma"),
)
# Processes, model and layout, by the launch that they share; four processes take long.
LAUNCHES = {
    "one": [
        *((1, model, ONE) for model in ("dense", "tied", "experts", "thirds")),
        (1, "three layers", FROZEN),
        *((1, family, WHOLE) for family in OWN),
    ],
    "two": [
        # Over two stages the gradients of both copies of a tied embedding are summed.
        *((2, "tied", layout) for layout in ("2,1,1,full", "1,2,1,none", "1,2,1,selective")),
        *((2, "dense", layout) for layout in (*KEPT, NOT_KEPT)),
        *((2, "experts", layout) for layout in ("1,1,2,none", "1,1,1,none,overlap", "2,1,2,full")),
        *((2, "three layers", layout) for layout in (FROZEN, "1,2,1,none,frozen,uneven")),
        *((2, family, SPLIT.get(family, "2,1,1,none,whole")) for family in OWN),
    ],
    "four": [(4, "experts", "1,2,2,selective")],
    "three": [(3, "thirds", "3,1,1,none")],
    "further four": [
        (4, "experts", f"{sizes},none") for sizes in ("2,1,2", "1,1,2", "2,1,1", "2,1,4")
    ],
    "further one": [(1, family, WHOLE) for family in OTHERS],
    "further two": [
        *((2, family, "2,1,1,none,whole") for family in OTHERS),
        *((2, family, NOT_KEPT) for family in (*OWN, *OTHERS)),
        *((2, family, "2,1,2,full,whole") for family in ("glm4_moe", "deepseek_v3")),
    ],
}
CELLS = [
    pytest.param(launch, *cell[1:], marks=pytest.mark.extended if "further" in launch else ())
    for launch, cells in LAUNCHES.items()
    if "one" not in launch
    for cell in cells
]


def make_batch():
    """Ragged rows: micro-batches of two have different lengths on every rank."""
    batch = ppo_batch([16, 9, 12, 4, 5, 14, 7, 10], [4, 3, 6, 2, 1, 7, 5, 8])
    return {**batch, "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 0])}


def generate(role, whole):
    """Responses to all rows' first tokens; ranks draw different numbers of tokens for theirs."""
    generator = Generator(
        role.gpt,
        role.architecture,
        eos_ids=tuple(range(0, 256, 9)),
        pad_id=0,
        length=LengthParams(max_length=12),
        sampling=SamplingParams(),
        max_batch_size=3,
    )
    rank, ranks = role.parallel.dp_rank, role.parallel.dp_size
    rows = torch.arange(ROWS).chunk(ranks)[rank]
    prompts = whole["input_ids"][rows, :5]
    output = generator.sample(prompts, torch.full_like(rows, 5), rows, seed=3)
    mine = [tokens[:length] for tokens, length in zip(output.tokens, output.lengths, strict=True)]
    by_rank = dict(gather_objects((rank, mine)))
    return [tokens for rank in range(ranks) for tokens in by_rank[rank]]


def train(cls, loss, model, settings, save_to):
    """Two updates; what was reported and the answers before and after, of all rows."""
    role = load_from_nemo(cls, settings, restore_path=model)
    role.setup_training()
    role.loss_fn = loss
    whole = make_batch()
    rank, ranks = role.parallel.dp_rank, role.parallel.dp_size
    share = {key: value.chunk(ranks)[rank] for key, value in whole.items()}
    before = role.infer_tokens(whole)
    generated = generate(role, whole) if isinstance(role, MegatronGPTActorModel) else []
    if settings.micro_batch_size == ROWS and isinstance(role, MegatronGPTCriticModel):
        role.get_values(share)
    passes = []
    role.gpt.decoder.register_forward_hook(lambda *_: passes.append(None))
    role.prepare_for_training()
    updates = [role.training_update(share, number) for number in range(2)]
    seen = {"updates": updates, "before": before, "generated": generated, "passes": len(passes)}
    role.save_to(str(save_to))
    return {**seen, "after": role.infer_tokens(whole)}


def train_roles(folder, model, layout):
    """Actor and critic in one layout, of a family the actor."""
    *sizes, recompute = layout.split(",")[:4]
    others = layout.split(",")[4:]
    whole, overlap = "whole" in others, "overlap" in others
    optimizer.DistributedDataParallelConfig = functools.partial(
        DistributedDataParallelConfig, bucket_size=2000 if overlap else None
    )
    tensor, pipeline, expert = map(int, sizes)
    sizes = {"tensor": tensor, "pipeline": pipeline, "expert": expert}
    first_stage = 2 if "uneven" in others else None
    settings = RoleSettings(
        parallel=ParallelConfig(**sizes, sequence_parallel=tensor > 1, first_stage=first_stage),
        freeze_moe_router="frozen" in others,
        recompute=None if recompute == "none" else recompute,
        dropout=0.0,  # as some families have it
        optim=OptimConfig(lr=5e-3, eps=1e-2),  # a small eps turns rounding into updates
        micro_batch_size=ROWS if whole else 1,
        global_batch_size=ROWS,
        gradient_clip_val=0.1,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    roles = {"actor": (MegatronGPTActorModel, PPOPolicyLoss(entropy_bonus=0.01))}
    if model in MODELS:
        roles["critic"] = (MegatronGPTCriticModel, PPOValueLoss(value_clip=0.2))
    seen = {}
    for name, (cls, loss) in roles.items():
        path = folder / f"{os.environ['WORLD_SIZE']} {model} {layout} {name}.nemo"
        role = train(cls, loss, str(folder / model), settings, path)
        seen[name] = {**role, "weights": path}
    return seen


def train_all(folder, cells):
    return {(model, layout): train_roles(folder, model, layout) for _, model, layout in cells}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random models, their weights large enough that layouts could differ."""
    folder = tmp_path_factory.mktemp("roles")
    for name, architecture in MODELS.items():
        weights = random_weights(architecture, scale=0.2)
        save_nemo(folder / name, weights, architecture, byte_level_tokenizer().files())
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    @functools.cache
    def launched(launch):
        cells = LAUNCHES[launch]
        for _, model, _ in cells:
            if not (folder / model).exists():
                save_random_model(*FAMILIES[model], folder / model)
        return on_ranks(cells[0][0], train_all, folder, cells, timeout_s=480)

    return launched


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launch", "model", "layout"), CELLS)
def test_a_layout_equals_one_process(launch, model, layout, seen):
    alone = seen("further one" if model in OTHERS else "one")
    one = next(roles for (name, _), roles in alone.items() if name == model)
    for role, expected in one.items():
        many = seen(launch)[model, layout][role]
        assert_same(expected, many)
        assert len(many["generated"]) == (ROWS if role == "actor" else 0)


def assert_same(one, many, tolerance=1e-5):
    """Answers, reports, responses and the written weights of one role, relative to the largest."""
    for key in ("before", "after"):
        scale = one[key].abs().max().clamp(min=1e-3)  # a fresh critic says 0 everywhere
        assert (one[key] - many[key]).abs().max() / scale < tolerance, key
    assert (one["after"] - one["before"]).abs().max() > 1e-3  # there was something to compare
    for single, spread in zip(one["updates"], many["updates"], strict=True):
        assert single.keys() == spread.keys()
        assert single["grad_norm"] > 0.1  # clipped, so that a wrong norm would move the weights
        for key, value in single.items():
            assert spread[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    for single, spread in zip(one["generated"], many["generated"], strict=True):
        assert torch.equal(single, spread)
    with open_nemo(one["weights"]) as single, open_nemo(many["weights"]) as spread:
        assert list(single.weights) == list(spread.weights)
        for key, tensor in single.weights.items():
            difference = (tensor - spread.weights[key]).abs().max()
            assert difference / tensor.abs().max().clamp(min=1e-3) < tolerance, key


@pytest.mark.timeout(600)
def test_the_first_update_of_a_critic_makes_no_pass(seen):
    passes = {
        layout: seen("two")["dense", layout]["critic"]["passes"] for layout in (*KEPT, NOT_KEPT)
    }
    assert passes == {**dict.fromkeys(KEPT, 1), NOT_KEPT: 2}


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_routers_stay_and_all_other_weights_move(role, seen, folder):
    trained = seen("one")["three layers", FROZEN][role]["weights"]
    with open_nemo(folder / "three layers") as before, open_nemo(trained) as after:
        moved = {
            name: not torch.equal(tensor, after.weights[name])
            for name, tensor in before.weights.items()
            if name in after.weights
        }
    assert [name for name, is_moved in moved.items() if is_moved == (".router." in name)] == []
    assert sum(".router." in name for name in moved) == 3


def test_a_run_state_has_frozen_weights_too(folder):
    settings = {"optim": OptimConfig(lr=1e-2), "freeze_moe_router": True}
    settings |= {"micro_batch_size": 8, "global_batch_size": 8}
    first, second = (
        load_role(MegatronGPTActorModel, PPOPolicyLoss(), folder / "three layers", **settings)
        for _ in range(2)
    )
    first.prepare_for_training()
    first.training_update(make_batch())
    state = first.run_state()
    routers = {name for name in state["slices"] if ".router." in name}
    assert len(routers) == 3
    assert {*state["slices"]["decoder.final_layernorm.weight"]["tensors"]} > {"weight"}
    for name in routers:
        assert {*state["slices"][name]["tensors"]} == {"weight"}
    with torch.no_grad():
        for name, parameter in second.gpt.named_parameters():
            if ".router." in name:
                parameter.zero_()
    second.load_run_state([state])
    restored = dict(second.gpt.named_parameters())
    for _ in range(2):  # as it was saved, and after another update
        for name, parameter in first.gpt.named_parameters():
            assert torch.equal(parameter, restored[name]), name
        for role in (first, second):
            role.training_update(make_batch())
