"""How models are built for a GPU, on the dry device."""

import pytest
from variants import extended_except

from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE

LAYERS = TINY_ARCHITECTURE.num_layers
# Kernels that each layer saves: SwiGLU's, and the rotation's of query and key.
LEAST_SAVED = {"update": 30, "scoring": 15}


@pytest.mark.parametrize("biased", extended_except([False], [False, True]), ids=["plain", "biased"])
def test_fused_operations_are_fewer_kernels(dry, biased):
    chain, fused = (
        dry("dry_build:actor", biased=biased, fusions=fusions) for fusions in (False, True)
    )
    for phase, least in LEAST_SAVED.items():
        assert fused[phase]["launches"] <= chain[phase]["launches"] - least * LAYERS
        assert fused[phase]["flops"] == chain[phase]["flops"]
        assert fused[phase]["host_reads"] == chain[phase]["host_reads"]
        assert fused[phase]["peak_bytes"] <= chain[phase]["peak_bytes"]


FAMILIES = (
    *("gemma2", "gemma3", "olmo2", "granite", "smollm3"),
    *("qwen2_moe", "glm4_moe", "deepseek_v3", "gpt_oss"),
)


@pytest.mark.parametrize("family", extended_except(("gemma2", "gemma3"), FAMILIES))
def test_families_with_layers_of_their_own_train_and_sample(dry, family):
    plain = dry("dry_build:actor", biased=False, fusions=True)["update"]
    found = dry("dry_build:family", name=family)
    assert found["peak_bytes"] > 0
    if family in FAMILIES[1:5]:  # the same products
        assert found["flops"] == plain["flops"]
    if family in FAMILIES[:5]:
        token = dry("dry_build:per_token", family=family)
        assert token["logits"] == ["torch.float32"]
        assert token["host_reads"] == 0


def test_experts_are_a_few_kernels(dry):
    chain, grouped = (dry("dry_build:experts", fusions=fusions) for fusions in (False, True))
    assert grouped["launches"] < 60 < chain["launches"] / 10
    assert grouped["flops"] == chain["flops"]


def test_layers_that_are_not_there_are_refused(dry):
    message = dry("dry_build:refusal")
    assert "model.layer_spec=transformer_engine needs Transformer Engine" in message
    assert "no GPU" not in message


def test_gradients_are_summed_by_products_where_the_kernel_is_installed(dry):
    for is_installed in (False, True):
        assert dry("dry_build:sums_gradients", is_installed=is_installed) == is_installed


def test_operations_repeat_where_it_is_asked(dry):
    assert dry("dry_build:determinism", asked=False)[:2] == [False, False]
    assert dry("dry_build:determinism", asked=True) == [True, True, ":4096:8", "Ring"]


def test_gradients_and_float32_weights_are_away_while_it_draws(dry):
    stays, goes = (dry("dry_build:placement", offload=offload) for offload in (False, True))
    assert goes["training"] == stays["training"]
    gone = stays["rollout"] - goes["rollout"]
    assert gone == pytest.approx(8 * goes["parameters"], rel=0.02)
    assert goes["back"] == pytest.approx(stays["back"], rel=0.02)


def test_copies_of_moments_take_no_more_than_their_bytes(dry):
    """torch takes a power of two bytes for each tensor that it pins: 107 GiB for these."""
    found = dry("dry_build:locked_bytes")
    assert found["parameters"] > 7.6e9
    assert found["locked"] == [pytest.approx(8 * found["parameters"], rel=1e-6)] * 2
    assert found["locked"][0] <= 60 << 30
    assert found["left"] == 0


def test_an_exchange_of_weights_waits_once(dry):
    assert dry("dry_build:exchange") == {"waits": 1, "launches": 60}


STEPS = {
    "bf16": {},
    "float32": {"precision": "32"},
    "top-p": {"top_p": 0.9},
    "TP": {"world": 2, "tp": 2},
    "without graphs": {"graphs": False},
    "LoRA": {"lora": True},
}
CAPTURED = ("bf16", "float32", "top-p", "LoRA")
LAUNCHES = {"TP": 103, "without graphs": 86}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_is_one_launch_without_a_wait(dry, case):
    """And copies of what it drew, from float32 logits of bfloat16 weights too."""
    found = dry("dry_build:per_token", **STEPS[case])
    assert found["logits"] == ["torch.float32"]
    narrow = "torch.float32" if case == "float32" else "torch.bfloat16"
    assert list(found["flops"]) == [narrow]
    # Nothing is captured that reads a value of the device or allocates for longer than a graph.
    assert found["host_reads"] == 0
    assert found["left_bytes"] < 4096  # once what is kept between rollouts was given up
    if case in CAPTURED:
        assert found["launches"] <= 4
        assert found["kernels"] > 80
    else:
        assert found["launches"] <= LAUNCHES[case]


KEPT = {
    "plain": {},
    "streamed": {"streamed": True},
    "top-p": {"top_p": 0.9, "vocab": 4096},
    "kept tokens, penalty": {"top_k": 20, "kept": 8, "penalty": 1.3},
}


@pytest.mark.parametrize("case", extended_except(("plain", "top-p"), KEPT))
def test_graphs_are_kept_between_rollouts(dry, case):
    """Across an update too; a rollout of other numbers of rows captures those."""
    found = dry("dry_build:rollouts", **KEPT[case])
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
    found = dry("dry_build:rollouts", **{case: True})
    captures = [count for count, *_ in found["rollouts"]]
    assert captures[2] > captures[1]


def test_what_a_graph_cannot_hold_is_refused(dry):
    assert dry("dry_build:captured_against_the_rules") == {"launches": 2, "value": 6}


@pytest.mark.parametrize("precision", ["bf16", "32"])
def test_attention_with_a_window_keeps_no_scores(dry, precision):
    """Of 8 heads over 4,096 tokens they would be 256 MiB in bfloat16."""
    found = dry("dry_build:windowed_attention", precision=precision)
    assert found["peak_bytes"] < 128 * 2**20


def test_top_p_sorts_many_rows_at_a_time(dry):
    """256 MiB of logits, where a CPU's cache wants less."""
    assert dry("dry_build:sorted_rows") == [441, 441, 118]
