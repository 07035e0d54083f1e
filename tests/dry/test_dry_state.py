"""Run states on the dry device: from its memory to files beside training, and back."""

import pytest
from variants import extended_except

CASES = {
    "actor": {"role": "actor", "precision": "bf16"},
    "actor, DP": {"role": "actor", "world": 2, "precision": "bf16"},
    "actor, TP, PP": {"role": "actor", "world": 4, "tp": 2, "pp": 2, "precision": "bf16"},
    "actor, offload": {"role": "actor", "precision": "bf16", "offload": True},
    "critic, TP": {"role": "critic", "world": 2, "tp": 2},
    "dtensor actor, DP": {"role": "actor", "backend": "dtensor", "world": 2},
    "dtensor critic, TP": {"role": "critic", "backend": "dtensor", "world": 2, "tp": 2},
}
OFTEN = ("actor, TP, PP", "actor, offload", "dtensor actor, DP")
ELEMENT = 4  # bytes of a weight, and of each of its two moments
SAVING_WAITS = 1  # for the copies
LOADING_WAITS = 5  # of each parameter, at most: its tensors come one by one, and count of steps


@pytest.mark.parametrize("case", extended_except(OFTEN, CASES))
def test_a_share_is_what_a_process_updates_and_comes_back(dry, case, tmp_path):
    # FSDP2 shares parameters out too, megatron-core's optimizer what it updates alone.
    shares = dry("dry_state:round_trip", folder=str(tmp_path), **CASES[case])
    copies = 2 if case == "actor, DP" else 1
    parameters = sum(share["parameters"] for share in shares)
    assert copies * sum(share["owned"] for share in shares) == parameters
    tensors = 1 if "offload" in case else 3  # moments wait on the host
    for share in shares:
        assert share["failure"] is None
        assert share["saved_bytes"] == tensors * ELEMENT * share["owned"]
        assert share["left_bytes"] == 0  # on the device
        assert sum(share["saving_waits"].values()) <= SAVING_WAITS, share["saving_waits"]
    # Where no other process updates the weights, those are copied beside what is updated.
    whole = not case.endswith("DP") and "dtensor" not in case
    for share in shares:
        assert share["places"] == ["cuda:0 torch.float32 True"]
        assert share["loaded_bytes"] == (4 if whole else 3) * ELEMENT * share["owned"]
        assert share["alive_bytes"] == pytest.approx(2 * ELEMENT * share["owned"], rel=0.05)
        assert share["steps"] == 1
        assert share["loading_waits"] <= LOADING_WAITS * share["tensors"] + 1


def test_a_whole_state_is_written_beside_an_update(dry, tmp_path):
    found = dry("dry_state:stored", folder=str(tmp_path))
    assert found["left_bytes"] == 0
    assert found["progress"] == {"step": 1}
    assert found["mean"] == [2.0, 2.0, 2.0]
    assert found["steps"] == 1
