"""Generation as it would run on a GPU: what a token costs, and what is rounded.

Counted on the tiny model, 4 layers, for one more token of 8 sequences in flight.
"""

import pytest
from variants import extended_except

CASES = {
    "bf16": {},
    "float32": {"precision": "32"},
    "top-p": {"top_p": 0.9},
    "TP": {"world": 2, "tp": 2},
    "without graphs": {"graphs": False},
    "LoRA": {"lora": True},
}
CAPTURED = ("bf16", "float32", "top-p", "LoRA")
LAUNCHES = {"TP": 169, "without graphs": 152}  # the fused norms of a GPU are 8 kernels each here


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_one_launch_without_a_wait(dry, case):
    """And copies of what it drew, from float32 logits of bfloat16 weights too."""
    found = dry("dry_generation:per_token", **CASES[case])
    assert found["logits"] == ["torch.float32"]
    narrow = "torch.float32" if case == "float32" else "torch.bfloat16"
    assert list(found["flops"]) == [narrow]
    # Nothing is captured that reads a value of the device or allocates for longer than a graph.
    assert found["host_reads"] == 0
    assert found["left_bytes"] < 4096  # once what is kept between rollouts was given up
    if case in CAPTURED:
        assert found["launches"] <= 4
        assert found["kernels"] > 100
    else:
        assert found["launches"] <= LAUNCHES[case]


FAMILIES = ("gemma3", "olmo2", "granite", "smollm3")


@pytest.mark.parametrize("family", extended_except(("gemma3",), FAMILIES))
def test_families_with_layers_of_their_own_sample(dry, family):
    found = dry("dry_generation:per_token", family=family)
    assert found["logits"] == ["torch.float32"]
    assert found["host_reads"] == 0


KEPT = {
    "plain": {},
    "streamed": {"streamed": True},
    "top-p": {"top_p": 0.9, "vocab": 4096},
    "kept tokens, penalty": {"top_k": 20, "kept": 8, "penalty": 1.3},
}


@pytest.mark.parametrize("case", extended_except(("plain", "top-p"), KEPT))
def test_graphs_are_kept_between_rollouts(dry, case):
    """Across an update too; a rollout of other numbers of rows captures those."""
    found = dry("dry_generation:rollouts", **KEPT[case])
    captures, launches, waits = zip(*found["rollouts"], strict=True)
    assert captures[:3] == (1, 1, 1)
    assert captures[3] <= 2
    assert launches[1] == launches[2] < launches[0]
    assert set(waits) == {3}  # no capture makes the host wait
    assert found["heard"] == ((3 * 8 + 6) * 14 if case == "streamed" else 0)


@pytest.mark.extended
@pytest.mark.parametrize("case", ["moved", "lora"])
def test_graphs_of_weights_that_moved_are_captured_anew(dry, case):
    """Or of copies with adapters merged into them, which every rollout makes."""
    found = dry("dry_generation:rollouts", **{case: True})
    captures = [count for count, *_ in found["rollouts"]]
    assert captures[2] > captures[1]


def test_what_a_graph_cannot_hold_is_refused(dry):
    assert dry("dry_generation:captured_against_the_rules") == {"launches": 2, "value": 6}


@pytest.mark.parametrize("precision", ["bf16", "32"])
def test_attention_with_a_window_keeps_no_scores(dry, precision):
    """Of 8 heads over 4,096 tokens they would be 256 MiB in bfloat16."""
    found = dry("dry_generation:windowed_attention", precision=precision)
    assert found["peak_bytes"] < 128 * 2**20


def test_top_p_sorts_many_rows_at_a_time(dry):
    """256 MiB of logits, where a CPU's cache wants less."""
    assert dry("dry_generation:sorted_rows") == [441, 441, 118]
