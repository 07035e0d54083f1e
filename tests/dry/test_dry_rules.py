"""The dry device refuses what a GPU's kernels refuse, though fake tensors would take it."""

import re

import pytest

SIDE, MAIN, HOST = "stream 1", "the default stream", "the host"
MIXED = r"(?s){}.*torch\.bfloat16 and torch\.float32"
DRAWN = "^{}.*draws from a generator inside a CUDA graph$"
REFUSED = {
    "read beside": f"on {SIDE} reads a .* tensor that .* on {MAIN} writes",
    "read after an earlier event": f"on {SIDE} reads .* mul_ on {MAIN} writes",
    "overwritten beside a read": f"zero_ on {MAIN} writes .* add on {SIDE} reads",
    "freed beside a read": f"memory of {MAIN} was freed .* while add on {SIDE} may still",
    "copy read too early": f"sum on {HOST} reads .* copy_ on {MAIN} writes",
    "source overwritten beside a copy": f"zero_ on {HOST} writes .* _to_copy on {MAIN} reads",
    "product": MIXED.format("mm"),
    "norm": MIXED.format("native_layer_norm"),
    "wide matrix": r"float64 tensor \[8, 8\]",
    "captured draw": DRAWN.format("rand"),
    "captured draw in place": DRAWN.format("exponential_"),
    "captured dropout": DRAWN.format("native_dropout"),
    "captured attention that drops": DRAWN.format("_scaled_dot_product_"),
}
UNREPEATABLE = {
    "sum of floats": "cumsum",
    "sum of numbers as floats": "cumsum",
    "histogram": "histc",
    "put": "put_",
}
ALLOWED = (
    *("product with wide sums", "wide vector", "sum of numbers", "sum on the host"),
    *("draw", "captured attention"),
    *("read after the stream", "read after an event", "read after the host waited"),
    *("freed and recorded", "freed and waited for"),
    *("copy read in time", "source that is not pinned"),
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_gpu_refuses_is_refused(dry, case):
    assert re.search(REFUSED[case], dry("dry_rules:said", name=case))


@pytest.mark.parametrize("case", UNREPEATABLE)
def test_what_does_not_repeat_is_refused_where_that_was_chosen(dry, case):
    message = dry("dry_rules:said", name=case, deterministic=True)
    assert message.startswith(UNREPEATABLE[case])
    assert dry("dry_rules:said", name=case) == ""


@pytest.mark.parametrize("case", ALLOWED)
def test_the_rest_runs(dry, case):
    assert dry("dry_rules:said", name=case, deterministic=True) == ""


@pytest.mark.parametrize("refuses", [False, True])
def test_host_memory_is_unlocked_before_it_goes_back(dry, refuses):
    """Where the system refuses to lock it, no error is left for the next kernel."""
    assert dry("dry_rules:locked_memory", refuses=refuses) == [not refuses, False]


@pytest.mark.parametrize("number", [0, 3])
def test_a_process_computes_on_its_own_device(dry, number):
    assert dry("dry_rules:device_of_rank", number=number) == [f"cuda:{number}"] * 2


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            {"role": "actor", "world": 4, "tp": 2, "batching": "packed", "precision": "bf16"},
            marks=pytest.mark.extended,
        ),
        {"role": "critic", "world": 2, "cp": 2, "batching": "shared"},
        {"role": "actor", "world": 2, "ep": 2, "precision": "bf16"},
    ],
    ids=["TP, DP", "CP", "EP"],
)
def test_ranks_of_a_group_communicate_in_one_order(dry, case):
    found = dry("dry_rules:collectives", **case)
    groups = {name for seen in found for name in seen if "-" in name}
    assert groups
    for group in groups:
        orders = [found[int(rank)].get(group) for rank in group.split("-")]
        assert all(order == orders[0] for order in orders), group


def test_the_spec_of_transformer_engine_takes_our_keywords(dry):
    assert dry("dry_rules:te_spec") == [["num_experts", "qk_layernorm"]]
