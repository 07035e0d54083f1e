"""Weights on their way to engines on GPUs, on the dry device.

1. A worker holds and exports weights only where an engine opens them: the rest is never freed.
2. A worker that shares its device gives activations' memory back when training ends.
3. The host waits for the device before an engine reads weights and after it has copied them.
"""


def test_weights_are_exported_where_they_are_opened_alone(dry):
    assert dry("dry_handover:exports", readers=[]) == [[], 0]
    assert dry("dry_handover:exports", readers=["GPU elsewhere"]) == [[], 0]
    assert dry("dry_handover:exports", readers=["GPU here"]) == [["GPU here"], 2 * 4096]


def test_every_step_of_a_refit_waits_for_the_device(dry):
    steps = [step for step in dry("dry_handover:order") if step != "release"]
    for number, step in enumerate(steps):
        if step != "synchronize":
            assert steps[number - 1] == steps[number + 1] == "synchronize", steps
    assert [step for step in steps if step != "synchronize"] == ["begin", "load", "finish"]


def test_memory_goes_back_after_training_where_the_device_is_shared(dry):
    assert dry("dry_handover:after_training", shared=False) == []
    assert dry("dry_handover:after_training", shared=True) == ["release"]
