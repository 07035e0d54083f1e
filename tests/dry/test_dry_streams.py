"""What the dry device says of streams, and of copies that run beside the host."""

import re

import pytest

SIDE, MAIN, HOST = "stream 1", "the default stream", "the host"


@pytest.mark.parametrize(
    "case",
    [
        *("read_after_the_stream", "read_after_an_event", "read_after_the_host_waited"),
        *(
            "freed_and_recorded",
            "freed_and_waited_for",
            "copy_read_in_time",
            "source_that_is_not_pinned",
        ),
    ],
)
def test_what_waits_is_right(dry, case):
    assert dry("dry_streams:said", name=case) == ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("read_beside", f"on {SIDE} reads a .* tensor that .* on {MAIN} writes"),
        ("read_after_an_event_that_came_too_early", f"on {SIDE} reads .* mul_ on {MAIN} writes"),
        ("overwritten_beside_a_read", f"zero_ on {MAIN} writes .* add on {SIDE} reads"),
        ("freed_beside_a_read", f"memory of {MAIN} was freed .* while add on {SIDE} may still"),
        ("copy_read_too_early", f"sum on {HOST} reads .* copy_ on {MAIN} writes"),
        ("source_overwritten_beside_a_copy", f"zero_ on {HOST} writes .* _to_copy on {MAIN} reads"),
    ],
)
def test_what_does_not_wait_is_refused(dry, case, words):
    assert re.search(words, dry("dry_streams:said", name=case))
