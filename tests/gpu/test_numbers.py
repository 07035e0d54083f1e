"""The same numbers on a GPU as on the CPU.

1. In float32 every role's scores, loss and gradients are the CPU's.
2. Padded, packed and dynamic batches and recomputation agree among themselves.
3. bfloat16 is near float32.
4. The same tokens are drawn; the sampler and the trainer speak of one distribution.
"""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from facts import CASES, PROMPTS, SAME, compute, on_host
from ranks import start_script

from benchmarks.common import with_repository

FLOAT32 = 1e-5  # of the largest score, of the loss, of a gradient's norm
BFLOAT16 = 0.05  # it rounds by up to 1 part in 256
DRAWN = ("greedy", "drawn", "drawn, top-k, top-p")
# A CPU is slow at bfloat16.
PRECISIONS = ["32", pytest.param("bf16", marks=pytest.mark.extended)]


@pytest.fixture(scope="module")
def here(device, models):
    return functools.cache(lambda precision: on_host(compute(models, precision)))


@pytest.fixture(scope="module")
def reference(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    process = start_script(
        Path(__file__).with_name("facts.py"),
        ["reference", folder / "facts.pt", models],
        folder / "log",
        {"ALIGNER_FORCE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    process.join(280)
    process.kill()
    assert process.exitcode == 0, (folder / "log").read_text()[-3000:]
    return torch.load(folder / "facts.pt", weights_only=True)


def largest(left, right):
    """Largest difference, over the largest value."""
    return float((left - right).abs().max() / right.abs().max())


def in_norm(left, right):
    """Norm of the difference, over the norm."""
    return float((left.double() - right.double()).norm() / right.double().norm())


def assert_same(found, expected, tolerance):
    assert largest(found["scores"], expected["scores"]) < tolerance
    assert largest(found["loss"], expected["loss"]) < tolerance
    assert found["gradients"].keys() == expected["gradients"].keys()
    differences = {
        name: in_norm(gradient, expected["gradients"][name])
        for name, gradient in found["gradients"].items()
    }
    assert max(differences.values()) < tolerance, differences


@pytest.mark.parametrize("case", CASES)
def test_float32_is_the_cpus(here, reference, case):
    assert all(float(each.norm()) > 0 for each in reference[case]["gradients"].values())
    assert_same(here("32")[case], reference[case], FLOAT32)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", SAME)
def test_kinds_of_batches_and_recomputation_agree(here, case, precision):
    facts = here(precision)
    assert_same(facts[case], facts[SAME[case]], FLOAT32 if precision == "32" else BFLOAT16)


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_near_float32(here, case):
    found, expected = here("bf16")[case], here("32")[case]
    assert largest(found["scores"], expected["scores"]) < BFLOAT16
    gradients = [
        torch.cat([gradient.double().flatten() for gradient in facts["gradients"].values()])
        for facts in (found, expected)
    ]
    assert float(torch.cosine_similarity(*gradients, dim=0)) > 0.99


@pytest.mark.parametrize("kind", DRAWN)
def test_the_same_tokens_are_drawn(here, reference, kind):
    found, expected = here("32")[kind], reference[kind]
    assert torch.equal(found["tokens"], expected["tokens"])
    assert torch.equal(found["lengths"], expected["lengths"])
    assert largest(found["logprobs"], expected["logprobs"]) < FLOAT32
    new = found["lengths"] - torch.tensor(PROMPTS)
    assert int(new.max()) > 4


def test_greedy_tokens_are_the_likeliest(here):
    means = {}
    for kind in ("greedy", "drawn"):
        logprobs = here("32")[kind]["logprobs"]
        means[kind] = float(logprobs[logprobs != 0].mean())
    assert means["greedy"] > means["drawn"] + 0.5


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_the_sampler_says_what_the_trainer_says(here, kind, precision):
    facts = here(precision)[kind]
    gaps = facts["gap"][facts["logprobs"] != 0].abs()
    print(f"gap of the sampler, {precision}, {kind}: mean {gaps.mean():.2e}, max {gaps.max():.2e}")
    assert float(gaps.mean()) < (FLOAT32 if precision == "32" else BFLOAT16)


def test_a_difference_is_seen(here):
    """What these tests would say of one weight's gradient that is off by a thousandth."""
    facts = here("32")["actor"]
    name = next(iter(facts["gradients"]))
    gradients = {**facts["gradients"], name: facts["gradients"][name] * 1.001}
    with pytest.raises(AssertionError, match=name):
        assert_same({**facts, "gradients": gradients}, facts, FLOAT32)


@pytest.mark.extended
def test_every_part_runs_on_fake_gpu_tensors(models, tmp_path):
    """Without a GPU: nothing that `facts` does mixes devices."""
    results = tmp_path / "found"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "tests/gpu/facts.py"), "dry", str(results), str(models)],
        env=with_repository(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert results.read_text() == f"{2 * (len(CASES) + len(DRAWN))} cases on cuda:0\n"
