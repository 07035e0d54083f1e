"""The start-up report, with arithmetic done by hand."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console
from settings import parsed

from aligner.algorithms.run.startup import working_memory
from aligner.config import RolloutConfig
from aligner.device.accelerator import DeviceInfo
from aligner.errors import VersionError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.observe.startup import (
    RoleMemory,
    StartupSummary,
    TrainedRole,
    batch_arithmetic,
    saving_sentence,
    startup_report,
)
from aligner.packages import (
    SUPPORTED,
    TRIED,
    OptionalPackage,
    check_versions,
    find_packages,
    untried_versions,
)


def arithmetic(**changes) -> list[str]:
    sizes = {"num_rollout_samples": 64, "num_rollouts_per_prompt": 4}
    rollout = RolloutConfig(**sizes, rollout_micro_batch_size=20)
    roles = [TrainedRole("policy", 32, 8), TrainedRole("critic", 64, 4)]
    given = {"steps": 10, "train_prompts": 100, "data_parallel_size": 2, "passes": 2}
    return batch_arithmetic(rollout, roles, **{**given, **changes})


def some_summary(**changes) -> StartupSummary:
    fields = {
        "device": DeviceInfo("CPU, 2 threads", False, 2**30),
        "processes": 2,
        "algorithm": "GRPO",
        "model": "models/tiny.nemo",
        "log_dir": "results/tiny",
        "batches": arithmetic(),
        "roles": [
            RoleMemory("policy", 1_000_001, True, model_parallel_size=2, optimizer_shards=2),
            RoleMemory("reference", 1_000_001, False, model_parallel_size=2),
        ],
        "working_bytes": {"KV cache": 1_000_000},
        "run_states": "Run states are written.",
        "packages": [],
    }
    return StartupSummary(**{**fields, **changes})


def text_of(summary: StartupSummary) -> str:
    console = Console(width=250)
    with console.capture() as capture:
        console.print(startup_report(summary))
    return capture.get()


def test_batches_and_memory_by_hand():
    assert arithmetic() == [
        "A step draws 16 prompts and samples 4 responses to each: 64 samples, 32 on each of "
        "2 data-parallel ranks, at most 20 of them in flight together.",
        "The policy trains on them twice in batches of 32: 4 updates a step (40 in the run), each "
        "the sum of 2 micro-batches of 8 on every rank.",
        "The critic trains on them twice in batches of 64: 2 updates a step (20 in the run), each "
        "the sum of 8 micro-batches of 4 on every rank.",
        "10 steps: 640 samples; 100 training prompts make an epoch of 6 steps and 4 prompts left "
        "over.",
    ]
    assert arithmetic(train_prompts=None)[-1] == "10 steps: 640 samples."
    policy, reference = some_summary().roles
    assert policy.local_parameters == 500_001
    assert (policy.weights, policy.gradients) == (2_000_004, 2_000_004)
    assert policy.optimizer == 250_001 * 8
    assert (reference.gradients, reference.optimizer) == (0, 0)


def test_working_memory_by_hand():
    model = TINY_ARCHITECTURE  # 4 layers, 64 wide, 4 groups of 8 channels, 272 columns of logits

    def memory_of(changes=""):
        sizes = "model.micro_batch_size=2 model.ppo.rollout_micro_batch_size=64"
        return working_memory(parsed(f"{sizes} {changes}"), model, length=100, on_gpus=False)

    assert memory_of() == {
        "KV cache": 2 * 4 * 4 * 8 * 64 * 100 * 4,
        "activations": 17 * 4 * 200 * 64 * 4,
        "output layer": 2 * 200 * 64 * 4 + 2 * 200 * 272 * 4,
    }
    full = "model.activations_checkpoint_granularity=full"
    memory = memory_of(full)
    assert memory["activations"] == (17 + 4) * 200 * 64 * 4
    packing = "model.sequence_packing.enabled=true model.sequence_packing.train_mb_tokens=1000"
    by_tokens = memory_of(f"{full} {packing}")
    assert by_tokens["activations"] == 5 * memory["activations"]
    assert by_tokens["output layer"] > memory["output layer"]


def test_versions_are_refused_or_reported():
    check_versions()
    check_versions({"torch": "2.10.0a0+b4e4ee81d3.nv25.12", "megatron-core": "0.16.1"}.get)
    check_versions({}.get)
    for torch, remedy in (("2.9.1+cu130", ">=2.10,<2.14"), ("2.14.0", "Dockerfile")):
        with pytest.raises(VersionError, match=rf"torch {re.escape(torch)} .*{remedy}"):
            check_versions({"torch": torch}.get)
    with pytest.raises(VersionError, match=r"megatron-core 0\.15\.0"):
        check_versions({"torch": "2.11.0", "megatron-core": "0.15.0"}.get)
    assert untried_versions() == []
    nvidia = {"nemo-toolkit": "2.5.0", "transformers": "5.16.1", "ray": "2.40.0"}
    outside = untried_versions({**nvidia, "transformer_engine": "2.12.0+abc"}.get)
    assert [line.split(" is installed")[0] for line in outside] == [
        "nemo-toolkit 2.5.0",
        "ray 2.40.0",
        "transformer_engine 2.12.0+abc",
    ]
    assert outside[0].endswith("3.0 or newer, below 3.1)")
    # The supported versions are those of the project file.
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    ranges = {**SUPPORTED, **TRIED}
    del ranges["transformer_engine"]  # no dependency
    lines = [*project["dependencies"], *project["optional-dependencies"]["ray"]]
    for name, (first, end) in ranges.items():
        (line,) = (each for each in lines if re.match(rf"{name}\b", each))
        low, high = re.search(r">=([\d.]+),<([\d.]+)$", line).groups()
        assert low.startswith(".".join(map(str, first)))
        assert high == ".".join(map(str, end))


def test_report_and_what_may_not_fit():
    restored = {"restored": (12, "results/step_000012"), "restores": ("policy", "optimizer")}
    text = text_of(some_summary(**restored, notes=("3 prompts were too long and dropped",)))
    for part in (
        *("GRPO on 2 processes: CPU, 2 threads", "3 prompts were too long", "reference (frozen)"),
        *("resumed after step 12 from results/step_000012: policy, optimizer", "1,000,001"),
        "= about",
    ):
        assert part in text
    assert "may not fit" not in text
    text = text_of(some_summary(device=DeviceInfo("CPU", False, 9_000_019)))
    assert "may not fit" in text
    assert "micro_batch_size" in text
    assert "a new run" in text
    assert "may not fit" not in text_of(some_summary(device=DeviceInfo("CPU", False, 9_000_020)))


def test_packages_are_looked_up_without_importing(tmp_path, monkeypatch):
    (tmp_path / "namesake").mkdir()
    (tmp_path / "namesake" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    package = OptionalPackage("namesake", "x", "y", submodule="optimizers", alternative="no_such_C")
    assert [status.is_installed for status in find_packages((package,))] == [False]
    (tmp_path / "namesake" / "optimizers").mkdir()
    assert [status.is_installed for status in find_packages((package,))] == [True]
    assert "namesake" not in sys.modules
    before = set(sys.modules)
    statuses = {status.package.name: status for status in find_packages()}
    assert set(statuses) >= {"apex", "transformer_engine", "flash_attn", "vllm", "wandb"}
    assert statuses["tensorboard"].is_installed
    assert not {"vllm", "wandb", "apex"} & (set(sys.modules) - before)


def test_how_run_states_are_written():
    policy = RoleMemory("policy", 1_000_000, True, optimizer_shards=2)
    adapted = RoleMemory("critic", 1_000_000, True, adapter_parameters=1_000)
    roles = [policy, adapted, RoleMemory("reference", 1_000_000, False)]
    size = 12 * 500_000 + 12 * 1_000

    def said(**changes) -> str:
        given = {"in_background": True, "processes_here": 2, "free_bytes": 2 * size}
        return saving_sentence(roles, **{**given, **changes})

    copy = "a copy takes 5.73 MiB of host memory on each of 2 processes"
    assert said() == f"Run states are written while training goes on: {copy}, 11.47 MiB are free."
    assert said(free_bytes=2 * size - 1).startswith("Run states are written in place, and steps")
    assert copy in said(free_bytes=0)
    assert "on each" not in said(processes_here=1)
    assert "async_save=false" in said(in_background=False)
    assert said() in text_of(some_summary(run_states=said()))
