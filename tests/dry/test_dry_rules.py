"""The dry device refuses what a GPU's kernels refuse, though fake tensors would take it."""

import pytest

MIXED = {"product": "mm", "norm": "native_layer_norm"}
UNREPEATABLE = {
    "sum of floats": "cumsum",
    "sum of numbers as floats": "cumsum",
    "histogram": "histc",
    "put": "put_",
}
ALLOWED = ("product with wide sums", "wide vector", "sum of numbers", "sum on the host")


@pytest.mark.parametrize("case", MIXED)
def test_two_float_dtypes_do_not_meet(dry, case):
    message = dry("dry_rules:said", name=case)
    assert MIXED[case] in message
    assert "torch.bfloat16 and torch.float32" in message


def test_matrices_are_not_float64(dry):
    assert "float64 tensor [8, 8]" in dry("dry_rules:said", name="wide matrix")


@pytest.mark.parametrize("case", UNREPEATABLE)
def test_what_does_not_repeat_is_refused_where_that_was_chosen(dry, case):
    message = dry("dry_rules:said", name=case, deterministic=True)
    assert message.startswith(UNREPEATABLE[case])
    assert dry("dry_rules:said", name=case) == ""


@pytest.mark.parametrize("case", ALLOWED)
def test_the_rest_runs(dry, case):
    assert dry("dry_rules:said", name=case, deterministic=True) == ""
