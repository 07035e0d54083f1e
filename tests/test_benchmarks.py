"""The benchmarks start from the functions that a run uses, so they must still fit these."""

import json

import pytest
from documented import ROOT
from ranks import run_script


def measured(module, *options):
    """The JSON that a benchmark prints last."""
    done = run_script(f"benchmarks.{module}", *options, folder=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.extended
def test_one_side_of_the_ppo_step_is_measured():
    options = "--only aligner --layers 1 --hidden 64 --vocab 256 --steps 1 --threads 1 --json"
    result = measured("ppo_step", *options.split())
    assert result["median_step_s"] > 0.0
    assert result["maxrss_MB"] > 0.0


def test_a_step_goes_through_no_more_code_than_it_did(tiny_nemo):
    """Marks to lower as the way becomes shorter; of files a step executes the aim is 45."""
    found = measured("step_trace", "--json", "--model", tiny_nemo)
    assert found["frames"][0].startswith("examples/train_gpt_ppo.py:")
    assert "/optimizer.py:" in found["frames"][-1]
    assert len(found["frames"]) <= 12
    assert found["frames_in_files"] <= 9
    assert {"aligner/losses/policy.py", "aligner/losses/advantages.py"} <= set(found["files"])
    assert len(found["files"]) <= 57  # other CPUs take other kernels
    assert found["lines"] <= 14_200


@pytest.mark.extended
def test_start_up_is_measured(tiny_nemo):
    options = ("--model", tiny_nemo, "--recipe", "recipes/ppo_tiny_cpu", "--rounds", "1")
    found = measured("startup", *options)
    assert 0 < found["help_cpu_s"] < found["import_cpu_s"]
    assert found["first_token_s"] > 0
