"""Weights from process to process, without vLLM."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest
import torch

from aligner.device import accelerator
from aligner.errors import WorkerError
from aligner.refit.broadcast import WeightBroadcast, open_rendezvous
from aligner.refit.controller import group_by_bytes
from aligner.refit.segments import Offer, accept

TENSORS = [
    ("a", torch.arange(7, dtype=torch.float32)),
    ("b", torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)),
    ("empty", torch.zeros(0, 4)),
    ("c", torch.tensor(5, dtype=torch.int64)),
]


@pytest.mark.parametrize(
    ("sizes", "budget", "groups"),
    [
        ([3, 3, 3], 6, ["ab", "c"]),
        ([3, 3, 3], 9, ["abc"]),
        ([9, 1, 9, 1], 5, ["a", "b", "c", "d"]),
        ([1, 9, 1, 1], 5, ["a", "b", "cd"]),
        ([], 5, []),
    ],
)
def test_groups_by_bytes(sizes, budget, groups):
    named = list(zip("abcd", sizes, strict=False))
    assert group_by_bytes(named, budget) == [list(group) for group in groups]


@contextmanager
def running(code):
    """A Python process of ``code`` with pipes, which is killed in the end."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], **pipes, env=env
    ) as python:
        try:
            yield python
        finally:
            python.kill()


READER = """
    import pickle, sys
    from aligner.refit.segments import accept
    tensors = accept(pickle.load(sys.stdin.buffer))
    sys.stdout.buffer.write(b"mapped\\n"); sys.stdout.flush()
    sys.stdin.buffer.read(1)  # the sender has let go by now
    pickle.dump([(n, t.dtype, t.tolist()) for n, t in tensors], sys.stdout.buffer)
"""


@pytest.mark.integration
def test_another_process_reads_a_segment():
    before = sorted(os.listdir("/dev/shm"))
    offer = Offer(iter(TENSORS), max_bytes=512)
    with running(READER) as reader:
        pickle.dump({accelerator.sharing_key(): offer.handle}, reader.stdin)
        reader.stdin.flush()
        assert reader.stdout.readline() == b"mapped\n"
        offer.close()
        output, _ = reader.communicate(b"x", timeout=60)
    assert pickle.loads(output) == [(n, t.dtype, t.tolist()) for n, t in TENSORS]
    assert sorted(os.listdir("/dev/shm")) == before


@pytest.mark.integration
def test_a_killed_sender_leaves_nothing():
    code = """
        import pickle, sys, torch
        from aligner.device import accelerator
        from aligner.refit.segments import Offer
        offer = Offer([("w", torch.ones(1000))], 4000)
        pickle.dump({accelerator.sharing_key(): offer.handle}, sys.stdout.buffer)
        sys.stdout.flush()
        sys.stdin.read()
    """
    with running(code) as sender:
        handles = pickle.load(sender.stdout)
        ((name, weight),) = accept(handles)
        sender.send_signal(signal.SIGKILL)
        sender.wait()
        assert (name, float(weight.sum())) == ("w", 1000.0)  # what is mapped stays
        with pytest.raises(WorkerError, match=r"cannot map.*refit=separate"):
            accept(handles)


def test_what_does_not_fit_or_is_elsewhere_is_refused():
    with pytest.raises(WorkerError, match="weights of 28 bytes exceed a segment of 27"):
        Offer(TENSORS[:1], 27)
    with pytest.raises(WorkerError, match=r"no policy worker shares.*refit=separate"):
        accept({"machine of somebody else": None})


def test_writes_of_a_reader_stay_its_own():
    offer = Offer(TENSORS[:1], 64)
    handles = {accelerator.sharing_key(): offer.handle}
    try:
        ((_, first),), ((_, second),) = accept(handles), accept(handles)
        first += 1
        assert torch.equal(second, TENSORS[0][1])
    finally:
        offer.close()


@pytest.mark.integration
def test_broadcast_to_a_process_outside_the_world(tmp_path):
    store = open_rendezvous("127.0.0.1", 0, 2, 60.0)
    code = f"""
        import pickle, torch
        from aligner.refit.broadcast import WeightBroadcast
        group = WeightBroadcast.join("127.0.0.1", {store.port}, 2, 60.0)
        tensor = torch.empty(2, 3, dtype=torch.bfloat16)
        group.send(tensor)
        with open({str(tmp_path / "received")!r}, "wb") as file:  # gloo may write to the output
            pickle.dump((group.rank, tensor.tolist()), file)
    """
    with running(code) as receiver:
        group = WeightBroadcast(store, 0, 2, 60.0)
        group.send(TENSORS[1][1])
        receiver.communicate(timeout=60)
    received = pickle.loads((tmp_path / "received").read_bytes())
    assert received == (1, TENSORS[1][1].tolist())


@pytest.mark.integration  # waits for three seconds
def test_who_is_missing_is_missed_in_time():
    store = open_rendezvous("127.0.0.1", 0, 2, 1.0)
    with pytest.raises(WorkerError, match=r"rank 0 of 2 could not connect.*within 1 s"):
        WeightBroadcast(store, 0, 2, 1.0)
    del store
    with pytest.raises(WorkerError, match=r"cannot connect to the policy at 127.0.0.1:1 .*1 s"):
        WeightBroadcast.join("127.0.0.1", 1, 2, 1.0)
