"""The DTensor backend gives megatron-core's numbers, in every layout of its own.

Scores, what training reports, the weights after two updates and sampled tokens, of actor and
critic: one megatron-core process against FSDP2 and tensor-parallel DTensors, whether micro-batches
are padded, dynamic or packed, or share prefixes, of conversations with recorded sets of what a
filter kept, too. Float32 rounding differs with the order of sums: the largest difference stays
within 1e-5 of the largest value of a tensor, or of a reported number. A run state brings back every
bit on the layout that saved it, and the same numbers on another.

A spec is ``family,backend,tensor,mode[,state]``. The models are FAMILY.nemo and FAMILY_critic.nemo,
or the directory FAMILY for both. The processes that tensor parallelism leaves are data parallel.
The mode says how micro-batches are formed. With ``state`` the roles resume from that run state.
"""

import dataclasses
import os
from functools import cache

import pytest
import torch
from layout_worker import (
    ROWS,
    TIED_GPT,
    handle_of,
    loss_of,
    make_batch,
    model_config,
    two_updates,
    weights_of,
)
from ranks import on_ranks
from role_checks import assert_near
from tiny_transformers import tiny_config, tiny_model

from aligner.checkpoint.hf.families import architecture_from_hf
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.config import LengthParams, OptimConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.models.policy.lm_policy import Policy

ONE, MASKED = "tiny,megatron,1,padded", "tiny,megatron,1,masked"
RECORDED = "tiny,megatron,1,recorded separate"  # sequences that begin alike, each for itself
NEWER = ("olmo2", "phi3", "starcoder2", "glm")  # norms over heads, joined projections, biases
DIRECTORIES = ("gemma3_text", "phi", "cohere2")  # that only transformers builds
# By number of processes; those of `make test-extended` are told apart by a word.
SPECS = {
    "4 further": [f"tiny,dtensor,2,{mode}" for mode in ("dynamic", "packed")],
    "2": [
        # With masks one rank has no valid token.
        *(f"tiny,dtensor,1,{mode}" for mode in ("packed", "masked", "recorded")),
        *("tiny,dtensor,2,recorded", "tiny,dtensor,2,padded"),
        *("qwen3,dtensor,2,packed", "gemma3_text,dtensor,2,packed"),
    ],
    "2 further": [
        "biased,dtensor,2,padded",
        *(f"{family},dtensor,2,packed" for family in ("mistral", *NEWER, *DIRECTORIES[1:])),
    ],
    "1 further": [
        *(f"{family},megatron,1,padded" for family in ("biased", "mistral", *NEWER)),
        *(f"{family},dtensor,1,padded" for family in DIRECTORIES[1:]),
    ],
    "1": [
        *(ONE, MASKED, RECORDED, "qwen3,megatron,1,padded"),
        *(f"tiny,dtensor,1,{mode}" for mode in ("dynamic", "packed")),
        *("gpt2,megatron,1,padded", "gpt2,dtensor,1,packed", "gemma3_text,dtensor,1,padded"),
        "tiny,dtensor,1,padded,2,tiny,dtensor,2,padded",  # resumed
    ],
}
CASES = [
    pytest.param(run, spec, marks=pytest.mark.extended if "further" in run else ())
    for run, specs in SPECS.items()
    for spec in specs
    if "dtensor" in spec
]
# With an eps above the gradients Adam is nearly plain descent, and an update is as exact as its
# gradient. A smaller eps enlarges the rounding of small gradients more than it does large updates.
# Biases begin at 0, and show the rounding, because differences are then relative to updates alone.
OPTIM = OptimConfig(lr=1e-2, eps=1.0)
# What tensor parallelism has to get right beyond plain Llama: norms of a rank's own heads, tied
# embeddings, biases that are added once, a sliding window.
TWO_LAYERS = dataclasses.replace(TINY_ARCHITECTURE, num_layers=2)
FAMILIES = {
    "tiny": TINY_ARCHITECTURE,
    "gpt2": dataclasses.replace(TIED_GPT, num_layers=2),
    "qwen3": dataclasses.replace(
        TWO_LAYERS, qk_layernorm=True, tie_embeddings=True, family="qwen3"
    ),
    "biased": dataclasses.replace(TWO_LAYERS, bias_linear=True),
    "mistral": dataclasses.replace(TWO_LAYERS, window_size=6, family="mistral"),
}


def start(folder, spec):
    family, backend, tensor, mode = spec.split(",")[:4]
    model, critic = str(folder / f"{family}.nemo"), str(folder / f"{family}_critic.nemo")
    if (folder / family).is_dir():
        model = critic = str(folder / family)
    config = model_config(model, f"{tensor},1,1,0,{mode}")
    short = dataclasses.replace(config.ppo, length_params=LengthParams(max_length=12))
    config = dataclasses.replace(config, ppo=short, optim=OPTIM)
    return {role: handle_of(role, config, critic, backend) for role in ("actor", "critic")}


def generated(policy, batch):
    """Responses to the first tokens of every row, and what a filter kept where it is recorded."""
    prompts = BatchedDataDict(
        {
            "input_ids": batch["input_ids"][:, :5],
            "input_lengths": torch.full((ROWS,), 5),
            "sample_ids": torch.arange(ROWS),
        }
    )
    policy.prepare_for_generation()
    output = policy.generate(prompts, seed=5)
    policy.finish_generation()
    rows = zip(output["output_ids"], output["unpadded_sequence_lengths"], strict=True)
    kept = [output["kept_ids"].sort().values] if "kept_ids" in output else []
    return [tokens[:length] for tokens, length in rows] + kept


def learn_and_resume(handle, batch, state, resumed):
    seen = two_updates(handle, batch, state, resumed)
    if isinstance(handle, Policy):
        seen["generated"] = generated(handle, batch)
    if not resumed:
        handle.load_state(state)
        handle.train(batch, loss_of(handle))
        seen["again"] = weights_of(handle)
    return seen


def learn_all(folder, specs):
    """By spec and role; run states go to a folder ``N,spec`` each."""
    seen = {}
    for spec in specs:
        _, _, _, _, *resumed = spec.split(",", 4)
        states = folder / (resumed[0] if resumed else f"{os.environ['WORLD_SIZE']},{spec}")
        states.mkdir(exist_ok=True)
        seen[spec] = {
            role: learn_and_resume(handle, make_batch(spec), states / role, bool(resumed))
            for role, handle in start(folder, spec).items()
        }
    return seen


def write(folder, name, architecture):
    """A policy, and a critic with a head that is not fresh, so that the body gets a gradient."""
    weights = random_weights(architecture, seed=2)
    head = torch.randn(1, architecture.hidden_size, generator=torch.Generator().manual_seed(3))
    files = byte_level_tokenizer().files()
    save_nemo(folder / f"{name}.nemo", weights, architecture, files)
    with_head = {**weights, "rm_head.weight": 0.1 * head, "rm_head.bias": torch.full((1,), 0.25)}
    save_nemo(folder / f"{name}_critic.nemo", with_head, architecture, files)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """By spec, of a run."""
    folder = tmp_path_factory.mktemp("dtensor")
    for name, architecture in FAMILIES.items():
        write(folder, name, architecture)
    tokenizer = byte_level_tokenizer()
    for name in NEWER:
        config = tiny_config(name, vocab_size=tokenizer.vocab_size)
        write(folder, name, architecture_from_hf(config.to_dict()))
    for name in DIRECTORIES:
        tiny_model(name, vocab_size=tokenizer.vocab_size).save_pretrained(folder / name)
        for file, content in tokenizer.files().items():
            (folder / name / file).write_bytes(content)

    @cache
    def launch(run):
        if run == "1":
            launch("2")  # what is resumed
        return on_ranks(int(run[0]), learn_all, folder, SPECS[run])

    return launch


@pytest.mark.parametrize(("run", "spec"), CASES)
def test_a_layout_equals_one_megatron_process(run, spec, seen):
    family = spec.partition(",")[0]
    references = {"masked": MASKED, "recorded": RECORDED}
    backend = "dtensor" if family in DIRECTORIES else "megatron"
    reference = references.get(spec.split(",")[3], f"{family},{backend},1,padded")
    resumed = spec.count(",") > 3
    for role, one in seen("1" if reference in SPECS["1"] else "1 further")[reference].items():
        other = seen(run)[spec][role]
        assert (one["after"] - one["before"]).abs().max() > 1e-4  # there was something to compare
        assert one["first"]["grad_norm"] > 0.1
        for ours, theirs in zip(one.get("generated", []), other.get("generated", []), strict=True):
            assert torch.equal(ours, theirs)
        keys = one.keys() - {"again", "generated", *(["first"] if resumed else [])}
        assert_near(*({key: each[key] for key in keys} for each in (one, other)), role)
        for name, weight in other.get("again", {}).items():  # from the run state, the same bits
            assert torch.equal(weight, other["weights"][name]), name
