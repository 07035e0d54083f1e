"""Generation as it would run on a GPU: what a token costs, and what is rounded.

Counted on the tiny model, 2 layers, for one more token of 8 sequences in flight.
"""

import pytest

CASES = {
    "bf16": {},
    "float32": {"precision": "32"},
    "TP": {"world": 2, "tp": 2},
    "top-p": {"top_p": 0.9},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_float32(dry, case):
    """Of bfloat16 weights too: products in bfloat16, sums and results in float32."""
    found = dry("dry_generation:per_token", **CASES[case])
    assert found["logits"] == ["torch.float32"]
    narrow = "torch.float32" if case == "float32" else "torch.bfloat16"
    assert list(found["flops"]) == [narrow]
