"""Which interpreters can hand weights over to each other; none of it needs a GPU."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from documented import ROOT
from engine_arguments import engine_arguments

from aligner.errors import ConfigError
from aligner.generation.vllm.settings import VllmConfig
from aligner.generation.vllm.worker import VERSIONS, VllmWorker
from aligner.refit.ends import RefitEnd, check_ends

POLICY = [
    RefitEnd(f"policy rank {rank}", f"GPU {rank}", True, "2.13.0+cu130", (2, 29, 3))
    for rank in range(2)
]
ENGINE = RefitEnd("engine 0", "GPU 1", True, "2.13.0+cu130", (2, 29, 3))
ON_CPU = RefitEnd("engine 0", "machine m", False, "2.13.0+cpu", None)
SECTION = {"section": VllmWorker.section, "versions": VERSIONS}


OTHER_TORCH = dataclasses.replace(ENGINE, torch="2.11.0+cu130")
OTHER_NCCL = dataclasses.replace(ENGINE, nccl=(2, 27, 5))
OTHER_CPU = dataclasses.replace(ON_CPU, name="policy rank 0", torch="2.10.0+cpu")
PATCH = dataclasses.replace(ENGINE, torch="2.13.1+cu129")
SOURCE_BUILD = dataclasses.replace(ENGINE, torch="2.13.0a0+5f0")


@pytest.mark.parametrize(
    ("policy", "engine", "ways"),
    [
        *((POLICY, engine, [False, True]) for engine in (ENGINE, PATCH, SOURCE_BUILD)),
        ([OTHER_CPU], ON_CPU, [False, True]),
        (POLICY, OTHER_TORCH, [True]),
        (POLICY, OTHER_NCCL, [False]),
    ],
    ids=["same", "patch", "source build", "cpu", "separate torch", "colocated nccl"],
)
def test_releases_that_are_accepted(policy, engine, ways):
    for separate in ways:
        check_ends(policy, engine, separate=separate, **SECTION)


@pytest.mark.parametrize(
    ("engine", "separate", "words"),
    [
        (
            *(OTHER_TORCH, False),
            r"refit=colocated: engine 0 \(torch 2\.11\.0\+cu130.*policy rank 1 \(torch 2\.13\.0"
            r".*requirements-vllm-cuda\.txt.*refit=separate",
        ),
        (
            *(OTHER_NCCL, True),
            r"refit=separate: policy rank 0 .*NCCL 2\.29\.3.*NCCL 2\.27\.5.*requirements-vllm-cuda",
        ),
        (
            *(dataclasses.replace(ENGINE, sharing_key="GPU 7"), False),
            r"refit=colocated: engine 0.*GPU 7.*\['GPU 0', 'GPU 1'\].*refit=separate",
        ),
        (ON_CPU, False, r"vllm\.python: engine 0 \(torch 2\.13\.0\+cpu, CPU\).*requirements-vllm"),
        (ON_CPU, True, r"vllm\.python: engine 0 \(torch 2\.13\.0\+cpu, CPU\).*requirements-vllm"),
    ],
)
def test_what_cannot_cross_is_refused(engine, separate, words):
    with pytest.raises(ConfigError, match=words):
        check_ends(POLICY, engine, separate=separate, **SECTION)


def test_an_engine_looks_before_it_starts():
    """A real worker, in an interpreter without vLLM: it is not asked for."""
    arguments = engine_arguments(VllmConfig())
    with pytest.raises(ConfigError, match=rf"engine 0 \(torch {torch.__version__[:4]}.*policy"):
        VllmWorker(arguments, tokenizer_files={}, pad_id=0, weights_from=POLICY)


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and line[0] != "#")


def test_the_requirements_for_gpus_agree_with_the_trainers():
    engine, trainer = pins("requirements-vllm-cuda.txt"), pins("requirements.txt")
    assert engine["torch"].split(".")[:2] == trainer["torch"].split(".")[:2]
    assert engine["ray"] == trainer["ray"]


@pytest.mark.integration
def test_an_engine_imports_no_package_that_its_environment_lacks():
    """The trainer's packages are hidden, as in an environment of requirements-vllm.txt."""
    packages = {"megatron-core": "megatron", "nemo-toolkit[core]": "nemo", "hydra-core": "hydra"}
    packages |= {"lightning": "lightning", "reasoning-gym": "reasoning_gym"}
    assert packages.keys() <= pins("requirements.txt").keys() - pins("requirements-vllm.txt").keys()
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({[*packages.values()]}))\n"
        "import aligner.generation.vllm.engine, aligner.generation.vllm.worker"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
