"""How models are built for a GPU, on the dry device.

1. Fused operations are taken there, and an update and a scoring pass launch fewer kernels.
2. Experts are a handful of kernels, whatever their number.
3. Transformer Engine's layers are refused where it is missing.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.checkpoint.tiny import TINY_ARCHITECTURE

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="the dry device compiles a small library: needs g++ or clang++",
)
LAYERS = TINY_ARCHITECTURE.num_layers
# Kernels that each layer saves: SwiGLU's, and the rotation's of query and key.
LEAST_SAVED = {"update": 30, "scoring": 15}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    results = tmp_path_factory.mktemp("dry") / "results.json"
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("build_worker.py")), str(results)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(results.read_text())


@pytest.mark.parametrize("model", ["plain", "biased"])
@pytest.mark.parametrize("phase", ["update", "scoring"])
def test_fused_operations_are_fewer_kernels(seen, model, phase):
    chain, fused = seen[f"{model}, False"][phase], seen[f"{model}, True"][phase]
    assert fused["launches"] <= chain["launches"] - LEAST_SAVED[phase] * LAYERS
    assert fused["flops"] == chain["flops"]
    assert fused["host_reads"] == chain["host_reads"]
    assert fused["peak_bytes"] <= chain["peak_bytes"]


def test_experts_are_a_few_kernels(seen):
    chain, grouped = seen["experts"]["False"], seen["experts"]["True"]
    assert grouped["launches"] < 60 < chain["launches"] / 10
    assert grouped["flops"] == chain["flops"]


def test_layers_that_are_not_there_are_refused(seen):
    assert "model.layer_spec=transformer_engine needs Transformer Engine" in seen["refusal"]
    assert "no GPU" not in seen["refusal"]


def test_gradients_are_summed_by_products_where_the_kernel_is_installed(seen):
    assert seen["gradient_sums"] == [False, True]
