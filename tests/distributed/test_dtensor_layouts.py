"""The DTensor backend gives megatron-core's numbers, in every layout of its own.

Scores, what training reports, the weights after two updates and sampled tokens, of actor and
critic: one megatron-core process against FSDP2 and tensor-parallel DTensors, whether micro-batches
are padded, dynamic or packed, or share prefixes, of conversations with recorded sets of what a
filter kept, too. Float32 rounding differs with the order of sums: the largest difference stays
within 1e-5 of the largest value of a tensor, or of a reported number. A run state brings back every
bit on the layout that saved it, and the same numbers on another.
"""

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from role_checks import assert_near
from tiny_transformers import tiny_config, tiny_model

from aligner.checkpoint.hf.families import architecture_from_hf
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights

WORKER = Path(__file__).with_name("dtensor_worker.py")
ONE, MASKED = "tiny,megatron,1,padded", "tiny,megatron,1,masked"
SEPARATE = "tiny,megatron,1,separate"  # sequences that begin alike, each for itself
RECORDED = "tiny,megatron,1,recorded separate"
NEWER = ("olmo2", "phi3", "starcoder2", "glm")  # norms over heads, joined projections, biases
DIRECTORIES = ("gemma3_text", "phi", "cohere2")  # that only transformers builds
# By number of processes; those of `make test-extended` are told apart by a word.
SPECS = {
    "4 further": [f"tiny,dtensor,2,{mode}" for mode in ("dynamic", "packed")],
    "2": [
        "tiny,dtensor,1,padded",
        "tiny,dtensor,1,packed",
        "tiny,dtensor,1,masked",  # one rank has no valid token
        "tiny,dtensor,1,shared",
        "tiny,dtensor,2,shared",
        "tiny,dtensor,1,recorded",
        "tiny,dtensor,2,recorded",
        "tiny,dtensor,2,padded",
        "qwen3,dtensor,2,packed",
        "gemma3_text,dtensor,2,packed",
    ],
    "2 further": [
        "biased,dtensor,2,padded",
        "mistral,dtensor,2,packed",
        *(f"{family},dtensor,2,packed" for family in (*NEWER, *DIRECTORIES[1:])),
    ],
    "1 further": [
        *(f"{family},megatron,1,padded" for family in ("biased", "mistral", *NEWER)),
        *(f"{family},dtensor,1,padded" for family in DIRECTORIES[1:]),
    ],
    "1": [
        *(ONE, MASKED),
        *(SEPARATE, RECORDED),
        "qwen3,megatron,1,padded",
        *(f"tiny,dtensor,1,{mode}" for mode in ("padded", "dynamic", "packed")),
        "gpt2,megatron,1,padded",
        "gpt2,dtensor,1,packed",
        "gemma3_text,dtensor,1,padded",
        "tiny,dtensor,1,padded,2,tiny,dtensor,2,padded",  # resumed
    ],
}
CASES = [
    pytest.param(run, spec, marks=pytest.mark.extended if "further" in run else ())
    for run, specs in SPECS.items()
    for spec in specs
    if "dtensor" in spec
]
# What tensor parallelism has to get right beyond plain Llama: norms of a rank's own heads, tied
# embeddings, biases that are added once, a sliding window.
FAMILIES = {
    "tiny": TINY_ARCHITECTURE,
    "gpt2": dataclasses.replace(
        TINY_ARCHITECTURE,
        num_layers=2,
        num_query_groups=8,
        activation="gelu_tanh",
        normalization="layernorm",
        position_embedding="learned_absolute",
        bias_linear=True,
        tie_embeddings=True,
        family="gpt2",
    ),
    "qwen3": dataclasses.replace(
        TINY_ARCHITECTURE, num_layers=2, qk_layernorm=True, tie_embeddings=True, family="qwen3"
    ),
    "biased": dataclasses.replace(TINY_ARCHITECTURE, num_layers=2, bias_linear=True),
    "mistral": dataclasses.replace(
        TINY_ARCHITECTURE, num_layers=2, window_size=6, family="mistral"
    ),
}


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
        processes = int(run[0])
        run_ranks(WORKER, processes, [folder, *SPECS[run]], timeout_s=280)
        return torch.load(folder / f"{processes}.pt", weights_only=True)

    return launch


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(("run", "spec"), CASES)
def test_a_layout_equals_one_megatron_process(run, spec, role, seen):
    family = spec.partition(",")[0]
    references = {"masked": MASKED, "shared": SEPARATE, "recorded": RECORDED}
    backend = "dtensor" if family in DIRECTORIES else "megatron"
    reference = references.get(spec.split(",")[3], f"{family},{backend},1,padded")
    one = {**seen("1" if reference in SPECS["1"] else "1 further")[reference][role]}
    other = {**seen(run)[spec][role]}
    assert (one["after"] - one["before"]).abs().max() > 1e-4  # there was something to compare
    assert one["first"]["grad_norm"] > 0.1
    resumed = spec.count(",") > 3
    assert all(map(torch.equal, one.pop("generated", []), other.pop("generated", [])))
    keys = one.keys() - ({"again", "first"} if resumed else {"again"})
    assert_near({key: one[key] for key in keys}, {key: other[key] for key in keys}, smallest=1e-3)
    if not resumed:  # from the run state, with the same bits
        for name, weight in other["weights"].items():
            assert torch.equal(weight, other["again"][name]), name
