"""Which interpreters can hand weights over to each other; none of it needs a GPU."""

import dataclasses
from pathlib import Path

import pytest
import torch

from aligner.config import LengthParams, SamplingParams
from aligner.errors import ConfigError
from aligner.generation.vllm.engine import EngineArguments
from aligner.generation.vllm.settings import VllmConfig
from aligner.generation.vllm.worker import VERSIONS, VllmWorker
from aligner.refit.ends import RefitEnd, check_ends

ROOT = Path(__file__).parents[3]
POLICY = [
    RefitEnd(f"policy rank {rank}", f"GPU {rank}", True, "2.13.0+cu130", (2, 29, 3))
    for rank in range(2)
]
ENGINE = RefitEnd("engine 0", "GPU 1", True, "2.13.0+cu130", (2, 29, 3))
ON_CPU = RefitEnd("engine 0", "machine m", False, "2.13.0+cpu", None)
SECTION = {"section": VllmWorker.section, "versions": VERSIONS}


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    "engine",
    [
        ENGINE,
        dataclasses.replace(ENGINE, torch="2.13.1+cu129"),  # a patch of the same release
        dataclasses.replace(ENGINE, torch="2.13.0a0+5f0"),
    ],
)
def test_the_same_release_is_accepted(engine, separate):
    check_ends(POLICY, engine, separate=separate, **SECTION)


def test_cpus_share_memory_whatever_their_torch():
    policy = dataclasses.replace(ON_CPU, name="policy rank 0", torch="2.10.0+cpu")
    for separate in (False, True):
        check_ends([policy], ON_CPU, separate=separate, **SECTION)


@pytest.mark.parametrize(
    ("engine", "separate", "words"),
    [
        (
            dataclasses.replace(ENGINE, torch="2.11.0+cu130"),
            False,
            r"refit=colocated: engine 0 \(torch 2\.11\.0\+cu130.*policy rank 1 \(torch 2\.13\.0"
            r".*requirements-vllm-cuda\.txt.*refit=separate",
        ),
        (
            dataclasses.replace(ENGINE, nccl=(2, 27, 5)),
            True,
            r"refit=separate: policy rank 0 .*NCCL 2\.29\.3.*NCCL 2\.27\.5.*requirements-vllm-cuda",
        ),
        (
            dataclasses.replace(ENGINE, sharing_key="GPU 7"),
            False,
            r"refit=colocated: engine 0.*GPU 7.*\['GPU 0', 'GPU 1'\].*refit=separate",
        ),
        (ON_CPU, False, r"vllm\.python: engine 0 \(torch 2\.13\.0\+cpu, CPU\).*requirements-vllm"),
        (ON_CPU, True, r"vllm\.python: engine 0 \(torch 2\.13\.0\+cpu, CPU\).*requirements-vllm"),
    ],
)
def test_what_cannot_cross_is_refused(engine, separate, words):
    with pytest.raises(ConfigError, match=words):
        check_ends(POLICY, engine, separate=separate, **SECTION)


def test_broadcasts_do_not_care_for_torch_nor_shared_memory_for_nccl():
    check_ends(POLICY, dataclasses.replace(ENGINE, torch="2.11.0"), separate=True, **SECTION)
    check_ends(POLICY, dataclasses.replace(ENGINE, nccl=(2, 27, 5)), separate=False, **SECTION)


def test_an_engine_looks_before_it_starts():
    """A real worker, in an interpreter without vLLM: it is not asked for."""
    arguments = EngineArguments(
        architecture=None,
        precision="bf16",
        eos_ids=[0],
        length=LengthParams(),
        sampling=SamplingParams(),
        max_batch_size=1,
        max_sequence_length=8,
        settings=VllmConfig(),
    )
    with pytest.raises(ConfigError, match=rf"engine 0 \(torch {torch.__version__[:4]}.*policy"):
        VllmWorker(arguments, tokenizer_files={}, pad_id=0, weights_from=POLICY)


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and line[0] != "#")


def test_the_requirements_for_gpus_agree_with_the_trainers():
    engine, trainer = pins("requirements-vllm-cuda.txt"), pins("requirements.txt")
    assert engine["torch"].split(".")[:2] == trainer["torch"].split(".")[:2]
    assert engine["ray"] == trainer["ray"]
