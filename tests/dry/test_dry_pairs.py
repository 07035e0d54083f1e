"""Every pair of role, backend, layout, batching, precision, recomputation and phases on a GPU.

The first cases meet most pairs and run always; `make test-extended` runs the rest.
"""

import dry_pairs
import pytest

ALWAYS = 5
CASES = [
    pytest.param(case, id=dry_pairs.name_of(case), marks=[pytest.mark.extended] * (n >= ALWAYS))
    for n, case in enumerate(dry_pairs.table())
]
# What the configuration refuses, or what would be another role.
IMPOSSIBLE = {
    ("backend", "dtensor"): [
        *(("role", role) for role in ("reward", "shared reward", "student", "teacher")),
        *(("pp", "first"), ("pp", "last"), ("cp", 2), ("ep", 2), ("lora", True)),
    ],
    ("trained", False): [("role", "dpo"), ("role", "student")],
    ("trained", True): [("role", "teacher")],
    ("lora", True): [("role", "shared reward"), ("role", "teacher")],
}


@pytest.mark.parametrize("case", CASES)
def test_a_combination_runs(dry, case):
    found = dry("dry_roles:phases", **dry_pairs.arguments(case))
    assert found["scoring"]["launches"] > 50
    if case["trained"]:
        assert found["update"]["launches"] <= found["first"]["launches"]
        kinds = found["update"]["kinds"]
        if case["backend"] == "megatron":
            assert kinds["gradients"] > 0
        elif case["dp"] > 1:  # FSDP2 keeps gradients where a reduce-scatter wrote them
            assert kinds["communication"] > 0


def test_no_pair_is_left_out():
    met = set().union(*map(dry_pairs.pairs_of, dry_pairs.table()))
    refused = {
        frozenset([value, other]) for value, others in IMPOSSIBLE.items() for other in others
    }
    assert dry_pairs.all_pairs() - met == refused
