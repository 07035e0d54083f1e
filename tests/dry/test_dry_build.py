"""How models are built for a GPU, on the dry device.

1. Fused operations are taken there, and an update and a scoring pass launch fewer kernels.
2. Experts are a handful of kernels, whatever their number.
3. Transformer Engine's layers are refused where it is missing.
"""

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


FAMILIES = ("gemma3", "olmo2", "granite", "smollm3", "qwen2_moe")


@pytest.mark.parametrize("family", extended_except(("gemma3",), FAMILIES))
def test_families_with_layers_of_their_own_train(dry, family):
    plain = dry("dry_build:actor", biased=False, fusions=True)["update"]
    found = dry("dry_build:family", name=family)
    assert found["peak_bytes"] > 0
    if family != "qwen2_moe":  # the same matrices
        assert found["flops"] == plain["flops"]


def test_experts_are_a_few_kernels(dry):
    seen = dry("dry_build:experts")
    chain, grouped = seen["False"], seen["True"]
    assert grouped["launches"] < 60 < chain["launches"] / 10
    assert grouped["flops"] == chain["flops"]


def test_layers_that_are_not_there_are_refused(dry):
    message = dry("dry_build:refusal")
    assert "model.layer_spec=transformer_engine needs Transformer Engine" in message
    assert "no GPU" not in message


def test_gradients_are_summed_by_products_where_the_kernel_is_installed(dry):
    assert dry("dry_build:gradient_sums") == [False, True]


def test_operations_repeat_where_it_is_asked(dry):
    without, asked = dry("dry_build:determinism")
    assert without[:2] == [False, False]
    assert asked == [True, True, ":4096:8", "Ring"]


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
