"""Every role as it would run on a GPU, on the dry device: what mixes devices fails as there.

1. Set-up, updates, scoring, rollouts and phases run in every layout, precision and kind of batch.
2. Memory is the closed form: bytes of weights, gradients and moments for each parameter.
3. The host waits for the device as often as is recorded here, not once more.
4. Gradients cross the wire once.
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
WORKER = Path(__file__).with_name("dry_worker.py")
CASES = {
    "actor": {"role": "actor", "precision": "bf16"},
    "actor, float32, top-p": {"role": "actor", "top_p": 0.9},
    "actor, LoRA, offload": {"role": "actor", "precision": "bf16", "lora": True, "offload": True},
    "actor, offload": {"role": "actor", "precision": "bf16", "offload": True},
    "actor, TP, DP, packed, recompute": {
        "role": "actor",
        "world": 4,
        "tp": 2,
        "packed": True,
        "precision": "bf16",
        "recompute": "full",
    },
    "actor, CP": {"role": "actor", "world": 2, "cp": 2, "precision": "bf16"},
    "actor, first stage": {"role": "actor", "world": 2, "pp": 2, "recompute": "selective"},
    "actor, last stage": {"role": "actor", "world": 2, "pp": 2, "rank": 1, "precision": "bf16"},
    "critic": {"role": "critic", "precision": "bf16", "packed": True},
    "critic, DP, offload": {"role": "critic", "world": 8, "precision": "bf16", "offload": True},
    "critic, untrained": {"role": "critic", "untrained": True},
    "critic, untrained, bf16": {"role": "critic", "untrained": True, "precision": "bf16"},
    "reward, TP, packed": {"role": "reward", "world": 2, "tp": 2, "packed": True},
    "reward": {"role": "reward", "precision": "bf16", "recompute": "full"},
}
# Times that the host reads a value of the device. A rollout draws four tokens for eight prompts.
UPDATE_READS = {"actor": 16, "critic": 5, "reward": 8}
SCORING_READS = 3
ROWS = 8
BF16_STATIC = 2 + 4 + 4 + 8  # weight, its float32 copy, its gradient, two moments; bytes


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `dry_worker.py` found, by case; one process, because importing takes longest."""
    results = tmp_path_factory.mktemp("dry") / "results.json"
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(WORKER), str(results), *map(json.dumps, CASES.values())],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(results.read_text()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_role_runs(seen, case):
    found = seen[case]
    assert "error" not in found, found["error"]
    assert found["scoring"]["launches"] > 50
    if "update" in found:
        assert found["update"]["flops"]
        assert found["update"]["launches"] <= found["first"]["launches"]


@pytest.mark.parametrize("case", [name for name in CASES if "untrained" not in name])
def test_the_host_waits_no_more_often_than_recorded(seen, case):
    found = seen[case]
    assert found["update"]["host_reads"] <= UPDATE_READS[CASES[case]["role"]]
    assert found["scoring"]["host_reads"] <= SCORING_READS


def test_memory_is_what_parameters_take(seen):
    found = seen["actor"]
    after_building = BF16_STATIC - 2
    assert found["static_bytes"] == pytest.approx(after_building * found["parameters"], rel=0.01)
    assert found["update"]["peak_bytes"] > BF16_STATIC * found["parameters"]


def test_offloaded_moments_leave_the_device_and_come_back(seen):
    found = seen["actor, offload"]
    gone = found["static_bytes"] - found["inference_bytes"]
    assert gone == pytest.approx(8 * found["parameters"], rel=0.01)
    assert found["back_bytes"] == pytest.approx(found["static_bytes"], rel=0.01)


def test_memory_is_told_by_kind(seen):
    found = seen["actor"]
    kinds, parameters = found["update"]["kinds"], found["parameters"]
    assert sum(kinds.values()) == found["update"]["peak_bytes"]
    assert found["update"]["peak_at"]
    for kind, size in {"weights": 2, "gradients": 4, "optimizer": 12}.items():
        assert kinds[kind] == pytest.approx(size * parameters, rel=0.02), kind
    assert kinds["activations"] > 0
    cache = found["rollout"]["kinds"]["kv_cache"]
    width = TINY_ARCHITECTURE.num_query_groups * TINY_ARCHITECTURE.kv_channels
    keys_and_values = 2 * TINY_ARCHITECTURE.num_layers * width
    slots = ROWS * 64  # tokens: what narrow heads take at least
    assert cache == pytest.approx(2 * keys_and_values * slots, rel=0.01)


def test_collectives_write_into_buffers_of_their_own(seen):
    assert "communication" not in seen["actor"]["update"]["kinds"]
    assert seen["actor, TP, DP, packed, recompute"]["scoring"]["kinds"]["communication"] > 0


def test_copies_to_the_host_are_counted(seen):
    found = seen["actor, offload"]
    assert found["back_copied_bytes"] == pytest.approx(8 * found["parameters"], rel=0.01)


def test_adapters_alone_have_gradients_and_moments(seen):
    lora, whole = seen["actor, LoRA, offload"], seen["actor, offload"]
    assert lora["static_bytes"] < 0.1 * whole["static_bytes"]


def test_gradients_cross_the_wire_once(seen):
    found = seen["critic, DP, offload"]
    gradients = 4 * found["parameters"]
    collectives = found["update"]["collectives"]
    _, size = collectives["reduce_scatter_tensor_coalesced_/8"]
    assert size == pytest.approx(gradients, rel=0.02)
    _, weights = collectives["allgather_into_tensor_coalesced_/8"]
    assert weights == pytest.approx(2 * found["parameters"], rel=0.02)  # bf16, but for the head


def test_bfloat16_passes_multiply_bfloat16(seen):
    """Float32 products are left to the output layer, whose log-probs are float32."""
    flops = seen["critic"]["update"]["flops"]
    assert flops["bfloat16"] > 100 * flops.get("float32", 0)
