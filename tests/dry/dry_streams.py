"""Cases of `test_dry_streams`: each ends in what the dry device says, or in "" where all waits."""

import torch

from aligner.checkpoint.background import CopyMemory
from aligner.device import accelerator
from aligner.errors import DryDeviceError
from aligner_plan.dry.device import DryDevice


def said(name):
    """The error of a case by name."""
    try:
        with DryDevice():
            CASES[name]()
    except DryDeviceError as error:
        return str(error)
    return ""


def on_the_device():
    return torch.ones(8, device="cuda")


def read_beside():
    side, weights = torch.cuda.Stream(), on_the_device()
    with torch.cuda.stream(side):
        weights.add(1)


def read_after_the_stream():
    side, weights = torch.cuda.Stream(), on_the_device()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights.add(1)


def read_after_an_event():
    side, done, weights = torch.cuda.Stream(), torch.cuda.Event(), on_the_device()
    done.record()
    with torch.cuda.stream(side):
        done.wait()
        weights.add(1)


def read_after_an_event_that_came_too_early():
    side, weights = torch.cuda.Stream(), on_the_device()
    done = torch.cuda.current_stream().record_event()
    weights.mul_(2)
    side.wait_event(done)
    with torch.cuda.stream(side):
        weights.add(1)


def read_after_the_host_waited():
    side, weights = torch.cuda.Stream(), on_the_device()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        weights.add(1)


def overwritten_beside_a_read():
    side, weights = torch.cuda.Stream(), on_the_device()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights.add(1)
    weights.zero_()


def freed_beside_a_read():
    side, weights = torch.cuda.Stream(), on_the_device()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights.add(1)
    del weights
    on_the_device()


def freed_and_recorded():
    side, weights = torch.cuda.Stream(), on_the_device()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights.add(1)
    weights.record_stream(side)
    del weights
    on_the_device()


def freed_and_waited_for():
    side, weights = torch.cuda.Stream(), on_the_device()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights.add(1)
    del weights
    torch.cuda.current_stream().wait_stream(side)
    on_the_device()


def copy_read_too_early():
    CopyMemory().copies([on_the_device()])[0].sum()


def copy_read_in_time():
    copy = accelerator.HostCopy(on_the_device())
    copy.wait()[0].tolist()


def source_overwritten_beside_a_copy():
    source = torch.ones(8, pin_memory=True)
    accelerator.to_device(source)
    source.zero_()


def source_that_is_not_pinned():
    source = torch.ones(8)
    accelerator.to_device(source)
    source.zero_()


CASES = {
    case.__name__: case
    for case in (
        *(read_beside, read_after_the_stream, read_after_an_event, read_after_the_host_waited),
        *(read_after_an_event_that_came_too_early, overwritten_beside_a_read),
        *(freed_beside_a_read, freed_and_recorded, freed_and_waited_for),
        *(copy_read_too_early, copy_read_in_time),
        *(source_overwritten_beside_a_copy, source_that_is_not_pinned),
    )
}
