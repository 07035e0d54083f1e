"""Every role as it would run on a GPU, on the dry device: what mixes devices fails as there.

`test_dry_pairs.py` has the layouts, precisions and kinds of batches.
"""

import pytest
from variants import extended_except

from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE

PACKED, SHARED = {"batching": "packed"}, {"batching": "shared"}
TOP_P = {"top_p": 0.9, "vocab": 4096}
# An actor in bfloat16, but for these.
CASES = {
    "actor": {},
    "actor, LoRA, offload": {"lora": True, "offload": True},
    "actor, offload": {"offload": True},
    "actor, TP, DP, packed, recompute": {"world": 4, "tp": 2, **PACKED, "recompute": "full"},
    "critic": {"role": "critic", **PACKED},
    "actor, shared": SHARED,
    "critic, CP, shared": {"role": "critic", "world": 2, "cp": 2, **SHARED, "precision": "32"},
    "critic, DP, offload": {"role": "critic", "world": 8, "offload": True},
    "actor, EP": {"world": 2, "ep": 2},
    "actor, packed": PACKED,
    "actor, kept tokens, top-k": {"top_k": 20, "kept": 8},
    "actor, kept tokens, top-p": {**TOP_P, "kept": 8, **PACKED},
    "actor, penalty": {"penalty": 1.3},
    "actor, learned positions": {"learned": True},
    "critic, learned positions": {"role": "critic", "learned": True},
    "actor, deterministic": {**TOP_P, "deterministic": True},
    "actor, EP, deterministic": {"world": 2, "ep": 2, "deterministic": True},
    "dtensor actor": {"backend": "dtensor", "precision": "32"},
    "dtensor critic, DP": {"role": "critic", "backend": "dtensor", "world": 2},
}
# Kernels, and times that the host waits for the device: of an update of two micro-batches, of
# scoring in one, and of a rollout of 4 tokens. Raise a number only for a reason. A launch of each
# is the copy of token ids to the host, which finds what they share.
BUDGETS = {
    "actor": {"update": (1359, 4), "scoring": (173, 1), "rollout": (473, 3)},
    "actor, EP": {"update": (1859, 22), "scoring": (328, 11)},  # 2 a layer and pass, permute's
    "critic": {"update": (1093, 3), "scoring": (300, 1)},  # packed
    "actor, packed": {"update": (1402, 4), "scoring": (361, 1)},
    "actor, TP, DP, packed, recompute": {
        "update": (1645, 4),
        "scoring": (391, 1),
        "rollout": (825, 3),
    },
    "actor, shared": {"update": (1470, 4), "scoring": (190, 1)},
    "critic, CP, shared": {"update": (1198, 3), "scoring": (190, 1)},
    # Which rows lack a record is read, once in each pass.
    "actor, kept tokens, top-k": {"update": (1510, 6), "scoring": (229, 2), "rollout": (528, 3)},
    "actor, kept tokens, top-p": {"update": (1565, 6), "scoring": (486, 3), "rollout": (584, 3)},
    "actor, penalty": {"rollout": (491, 3)},
    "actor, learned positions": {"update": (1022, 4), "scoring": (100, 1), "rollout": (308, 3)},
    "actor, deterministic": {"update": (1475, 4), "scoring": (221, 1), "rollout": (583, 3)},
    "dtensor actor": {"update": (1814, 6), "scoring": (242, 3)},  # a mask of ones a pass
}
# Of what others are too: "TP, DP, packed", "top-p" of kept tokens, and the critic's positions.
FURTHER = {"actor, packed", "actor, kept tokens, top-k", "actor, learned positions"}
FURTHER |= {"actor, penalty"}
ROWS = 8
BF16_STATIC = 2 + 4 + 4 + 8  # weight, its float32 copy, its gradient, two moments; bytes


@pytest.fixture(scope="module")
def seen(dry):
    plain = {"role": "actor", "precision": "bf16"}
    return lambda case: dry("dry_roles:phases", **{**plain, **CASES[case]})


@pytest.mark.parametrize("case", extended_except(BUDGETS.keys() - FURTHER, CASES))
def test_a_role_runs_with_no_more_kernels_and_waits_than_recorded(seen, case):
    found = seen(case)
    assert found["scoring"]["launches"] > 50
    if "update" in found:
        assert found["update"]["flops"]
        assert found["update"]["launches"] <= found["first"]["launches"]
    if "kept" in CASES[case]:
        assert found["kept"] == "cuda:0"
    for phase, (launches, waits) in BUDGETS.get(case, {}).items():
        assert found[phase]["host_reads"] <= waits, (phase, found[phase]["host_waits"])
        assert found[phase]["launches"] <= launches, phase


def test_memory_is_what_parameters_take(seen):
    found = seen("actor")
    after_building = BF16_STATIC - 2
    assert found["static_bytes"] == pytest.approx(after_building * found["parameters"], rel=0.01)
    assert found["update"]["peak_bytes"] > BF16_STATIC * found["parameters"]


def test_offloaded_moments_leave_the_device_and_come_back(seen):
    found = seen("actor, offload")
    moments = pytest.approx(8 * found["parameters"], rel=0.01)
    assert found["static_bytes"] - found["inference_bytes"] == moments
    assert found["back_copied_bytes"] == moments
    assert found["back_bytes"] == pytest.approx(found["static_bytes"], rel=0.01)
    # Kept between rollouts until they are given up: graphs, and the cache that they read.
    assert 0 < found["graph_bytes"] <= 512 << 10
    # Adapters alone have gradients and moments.
    assert seen("actor, LoRA, offload")["static_bytes"] < 0.1 * found["static_bytes"]


def test_memory_is_told_by_kind(seen):
    found = seen("actor")
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
    assert "communication" not in seen("actor")["update"]["kinds"]
    found = seen("actor, TP, DP, packed, recompute")
    assert found["scoring"]["kinds"]["communication"] > 0


def test_gradients_cross_the_wire_once(seen):
    found = seen("critic, DP, offload")
    gradients = 4 * found["parameters"]
    collectives = found["update"]["collectives"]
    _, size = collectives["reduce_scatter_tensor_coalesced_/8"]
    assert size == pytest.approx(gradients, rel=0.02)
    _, weights = collectives["allgather_into_tensor_coalesced_/8"]
    assert weights == pytest.approx(2 * found["parameters"], rel=0.02)  # bf16, but for the head


def test_shards_cross_the_wire_once_in_each_direction(seen):
    """FSDP2 gathers bfloat16 weights for each pass, and scatters float32 gradients."""
    found = seen("dtensor critic, DP")
    collectives, parameters = found["update"]["collectives"], found["parameters"]
    passes = 2 * 2  # of each micro-batch, forward and backward
    _, gathered = collectives["_allgather_base_/2"]
    assert gathered == pytest.approx(passes * 2 * parameters, rel=0.02)
    _, scattered = collectives["_reduce_scatter_base_/2"]
    assert scattered == pytest.approx(2 * 4 * parameters, rel=0.02)


def test_bfloat16_passes_multiply_bfloat16(seen):
    """The output layer too, though its log-probs are float32; a critic's head is float32."""
    flops = seen("critic")["update"]["flops"]
    assert flops["bfloat16"] > 100 * flops.get("float32", 0)
    for case in ("actor", "actor, LoRA, offload", "actor, TP, DP, packed, recompute"):
        for phase in ("update", "scoring"):
            assert set(seen(case)[phase]["flops"]) == {"bfloat16"}, (case, phase)
