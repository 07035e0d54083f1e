"""Benchmarks for a GPU, rehearsed: on the CPU at a tiny shape, on the dry device at full shape."""

import importlib
import json
import subprocess
import sys

import pytest
from documented import ROOT

from aligner.device import accelerator
from aligner_plan.devices import DEVICES, READ_SECONDS, WIRE_REACHED
from benchmarks.common import with_repository
from benchmarks.gpu import machine
from benchmarks.gpu.__main__ import PARTS, PYTEST, command_of

TINY = ["--device", "cpu", "--shape", "tiny", "--repeats", "1", "--warmup", "1"]
SIZES = {
    "update": ["--tokens", "64", "--sequence", "32"],
    "head": ["--tokens", "64"],
    "generation": ["--in-flight", "2", "3", "--prompt-tokens", "8", "--new-tokens", "8"],
    "offload": [],
    "save": [],
    "refit": [],
    "rates": ["--tokens", "64", "--copied-mb", "1"],
}
# Parts of each line that `plan` says something of.
PLANNED = {
    "update": {"update", "scoring"},
    "head": {"forward", "forward_backward"},
    "generation": {"rollout"},
    "offload": {"moments.there_and_back", "parked.there_and_back", "reference"},
    "save": {"next"},
    "refit": {"refit"},
    "rates": set(),
}


def seconds_in(tree):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from seconds_in(value)
        elif name == "seconds" or name.endswith("_s"):
            yield name, value


@pytest.mark.skipif(accelerator.has_gpu(), reason="this process computes on the GPU")
@pytest.mark.parametrize("name", SIZES)
def test_a_benchmark_runs_on_the_cpu(name, capsys, lines, tmp_path, monkeypatch):
    beforehand = tmp_path / "results.jsonl"
    beforehand.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setattr(machine, "PREDICTED", beforehand)
    importlib.import_module(f"benchmarks.gpu.{name}").main([*TINY, *SIZES[name]])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["benchmark"] for line in found] == [name] * (2 if name == "generation" else 1)
    for line in found:
        assert line["shape"] == "tiny"
        # A step's seconds are a difference, which may come to nothing at this size.
        times = [value for key, value in seconds_in(line) if key != "step_s"]
        assert times
        assert min(times) > 0
        assert set(line["over_plan"]) == PLANNED[name]
        for part, ratios in line["over_plan"].items():
            measured, said = line, line["predicted"]
            for key in part.split("."):
                measured, said = measured[key], said[key]
            seconds = measured["wait_s" if name == "save" else "seconds"]
            assert ratios == {"seconds": pytest.approx(seconds / said["plan"]["seconds"])}


def test_every_command_is_one_that_can_be_run():
    class Options:
        device, shape, card = "cuda", None, "h200"

    commands = [text for _, part in PARTS.values() for _, text in part if text != PYTEST]
    assert {text.split()[0] for text in commands} == set(SIZES)
    for text in commands:
        module = importlib.import_module(f"benchmarks.gpu.{text.split()[0]}")
        arguments = command_of(text, Options)[3:]
        with pytest.MonkeyPatch.context() as patch:
            asked = []
            patch.setattr(module, "measure", asked.append)
            module.main(arguments)
        assert asked[0].device == "cuda"


@pytest.fixture(scope="module")
def lines(dry):
    return dry("dry_benchmarks:measured", sizes=SIZES)


def test_every_benchmark_runs_on_the_dry_device(lines):
    assert {line["benchmark"] for line in lines} == set(SIZES)
    assert {line["device"] for line in lines} == {"dry"}


def test_an_update_is_counted_at_what_the_model_needs(lines):
    """Products in the pass and twice in its gradient; the output layer's once more."""
    (update,) = (line for line in lines if line["benchmark"] == "update")
    (head,) = (line for line in lines if line["benchmark"] == "head")
    counted = sum(update["update"]["flops"].values())
    again = 2.0 * head["tokens"] * head["hidden"] * head["vocab"]
    assert counted == pytest.approx(update["update"]["model_flops"] + again, rel=0.05)
    assert update["held_bytes"] > update["static_bytes"] > 10 * update["parameters"]
    assert sum(head["forward_backward"]["flops"].values()) == pytest.approx(4 * again, rel=0.05)


def test_plan_says_what_is_counted(lines):
    """Of few layers and a run's configuration what the benchmark's own role takes."""
    (update,) = (line for line in lines if line["benchmark"] == "update")
    for part in ("update", "scoring"):
        plan = update[part]["plan"]
        assert plan["card"] == "h200"
        assert plan["peak_bytes"] == pytest.approx(update[part]["peak_bytes"], rel=0.02)
    (save,) = (line for line in lines if line["benchmark"] == "save")
    # What a step waits for is the copy to host memory, and a value or two of the device.
    copied = save["bytes"] / (WIRE_REACHED * DEVICES["h200"].host)
    assert 0 <= save["next"]["plan"]["seconds"] - copied < 4 * READ_SECONDS
    for two in (line for line in lines if line["benchmark"] == "generation"):
        assert two["rollout"]["plan"]["peak_bytes"] > two["weight_bytes"]


def test_a_step_of_generation_costs_the_same_for_any_number_in_flight(lines):
    two, three = (line for line in lines if line["benchmark"] == "generation")
    assert two["launch_calls_per_step"] == three["launch_calls_per_step"] > 0
    assert two["host_reads_per_step"] == three["host_reads_per_step"] <= 3


def test_what_is_moved_leaves_the_device(lines):
    (line,) = (line for line in lines if line["benchmark"] == "offload")
    for part in ("moments", "parked"):
        assert line[part]["freed_bytes"] >= line[part]["bytes"] > 0


@pytest.mark.extended
@pytest.mark.parametrize("part", ["cost", "rates", "large"])
def test_a_part_runs_on_the_dry_device(part, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", part, "--device", "dry", "--out", str(tmp_path)],
        cwd=ROOT,
        env=with_repository(),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + (tmp_path / "log.txt").read_text()[-3000:]
