"""Weights on their way to engines on GPUs, on the dry device."""

import re

import pytest


def test_weights_are_exported_where_they_are_opened_alone(dry):
    """What nobody opens is never freed: this is CUDA's own rule."""
    assert dry("dry_handover:exports", readers=[]) == [[], 0, 0]
    assert dry("dry_handover:exports", readers=["GPU elsewhere"]) == [[], 0, 0]
    assert dry("dry_handover:exports", readers=["GPU dry"]) == [["GPU dry"], 2 * 4096, 2 * 4096]


def test_a_refit_waits_where_it_must_and_leaves_nothing(dry):
    found = dry("dry_handover:refit")
    assert found["loads"] == 2 * ["a", "b", "c"]
    assert found["left"] == 0
    # Of two groups: one wait of the policy, two of the engine; four more at beginning and end.
    assert found["waits"] == {"accelerator.synchronize": 10}


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (["__init__", 0], "copy_ on stream .* of the engine reads .* of the policy writes"),
        (["_synchronized", 1], "of the policy was freed .* while copy_ on stream .* of the engine"),
    ],
    ids=["after exporting", "after a step"],
)
def test_a_wait_that_is_missing_is_seen(dry, place, words):
    assert re.search(words, dry("dry_handover:refit", without=place)["error"])


def test_weights_have_come_before_the_engine_reads_them(dry):
    assert dry("dry_handover:received") == ""
    missing = dry("dry_handover:received", without=["_synchronized", 0])
    assert re.search("copy_ on stream 1 of the engine reads .* fill_ on the default", missing)


@pytest.mark.parametrize("phase", ["training", "inference"])
def test_memory_goes_back_after_a_phase_where_the_device_is_shared(dry, phase):
    assert dry("dry_handover:given_back", phase=phase, shared=False) == 0
    assert dry("dry_handover:given_back", phase=phase, shared=True) == 1
