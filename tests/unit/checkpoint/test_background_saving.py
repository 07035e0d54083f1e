"""Run states that are written while training goes on."""

import errno
import io
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from newest_state import newest
from ranks import FORKSERVER
from test_run_loop import Counter, lines, run

from aligner.algorithms.run import stopping
from aligner.checkpoint import durable
from aligner.checkpoint.run_state import worker_state
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.checkpoint.run_state.tree import bytes_to_copy, read_tree
from aligner.checkpoint.run_state.worker_state import ShareWriter
from aligner.errors import AlignerError, StorageError
from aligner.observe.metrics import read_metrics

NUMBERS = 100_000


class Role:
    """A worker of one rank with a weight, a moment that is a slice, and a tied copy."""

    def __init__(self, rank: int = 0, ranks: int = 1, numbers: int = NUMBERS) -> None:
        self.buffer = torch.zeros(numbers)
        self.moments = torch.zeros(2, numbers)
        self.num_shares = ranks
        self.writer = ShareWriter(
            SimpleNamespace(
                parallel=SimpleNamespace(rank=rank, world_size=ranks, layout_in_words="here"),
                state_dict=self.state_dict,
            )
        )

    def state_dict(self):
        weight = self.buffer[10:].view(-1, 10)
        first = self.buffer[:10]
        return {"weight": weight, "first": first, "tied": weight, "moment": self.moments[1]}

    def train(self, step: int) -> None:
        self.buffer.copy_(torch.arange(len(self.buffer)) * step)
        self.moments.fill_(step)

    def prepare_saving(self):
        self.writer.prepare()

    def begin_saving(self, folder, in_background):
        self.writer.begin(str(folder), in_background)

    def check_saving(self, wait):
        if (failure := self.writer.failure(wait)) is not None:
            raise StorageError(failure)


def save(store: RunStateStore, role: Role, step: int, in_background: bool = True) -> Path:
    counters = {"counters": {"step": step}}
    return store.save(step, counters, roles={"role": role}, in_background=in_background)


def step_in(path: Path, ranks: int = 1, numbers: int = NUMBERS) -> int:
    """The step of a whole state, every number of which is that step's."""
    loaded = RunStateStore(path.parent).load(path)
    files = ["checksums.json", *(f"rank_{rank:05d}.pt" for rank in range(ranks))]
    assert sorted(each.name for each in (path / "role").iterdir()) == files
    for rank in range(ranks):
        state = read_tree(path / "role" / f"rank_{rank:05d}.pt")["state"]
        expected = Role(numbers=numbers)
        expected.train(loaded.step)
        for name, tensor in expected.state_dict().items():
            assert torch.equal(state[name], tensor), name
    assert loaded.state["counters"] == {"step": loaded.step}
    return loaded.step


class SlowDisk:
    """Files with this ``ending`` are written, or fail, once the gate is opened."""

    def __init__(self, monkeypatch, ending: str = ".pt", error: int | None = None) -> None:
        self.gate, self.began = threading.Event(), threading.Event()
        real = io.FileIO.write

        class File(io.FileIO):
            def write(file, data):
                if str(file.name).endswith(ending):
                    self.began.set()
                    if not self.gate.wait(60):
                        raise TimeoutError("nobody opened the gate")
                    if error is not None:
                        raise OSError(error, os.strerror(error))
                return real(file, data)

        monkeypatch.setattr(durable, "_File", type("SlowFile", (durable._File, File), {}))


def test_a_slow_disk_holds_up_the_next_save_and_nothing_before_it(tmp_path, monkeypatch):
    store, role = RunStateStore(tmp_path, save_last_k=2), Role()
    role.train(1)
    save(store, role, 1)
    store.finish()
    disk = SlowDisk(monkeypatch, "rank_00000.pt")
    role.train(2)
    save(store, role, 2)
    role.train(3)  # goes on
    disk.began.wait(30)
    store.check()
    assert store.is_saving
    assert [state.step for state in store.states()] == [1]

    threading.Timer(0.3, disk.gate.set).start()
    started = time.monotonic()
    save(store, role, 3)
    assert time.monotonic() - started > 0.25
    assert [step_in(state.path) for state in store.states()] == [1, 2]
    while store.is_saving:
        store.check()
    assert [step_in(state.path) for state in store.states()] == [2, 3]
    assert not list(tmp_path.glob(".*"))


def test_the_bytes_are_those_written_in_place_and_memory_is_one_copy(tmp_path):
    role, memory = Role(), None
    role.train(5)
    for number, in_background in enumerate([False, True, True]):
        torch.manual_seed(0)
        random.seed(0)
        store = RunStateStore(tmp_path / str(number))
        save(store, role, 5, in_background)
        store.finish()
        memory = (memory or role.writer._memory._memory) if in_background else None
    files = [(tmp_path / f"{n}/step_000005/role/rank_00000.pt").read_bytes() for n in range(3)]
    assert files[0] == files[1] == files[2]
    assert role.writer._memory._memory is memory
    share = worker_state._share_of(role.writer._worker)
    assert role.writer._memory.size == bytes_to_copy(share)
    # The slice without the rest of its storage, the tied weight once, and the random states.
    assert 0 < role.writer._memory.size - 2 * 4 * NUMBERS < 100_000


@pytest.mark.integration
def test_memory_taken_beforehand_is_what_the_first_copy_goes_into(tmp_path):
    """A share that grew takes its memory again."""
    role = Role(numbers=1000)
    role.prepare_saving()
    assert role.writer.failure(wait=True) is None
    role.buffer, role.moments = torch.zeros(10_000_000), torch.zeros(2, 10_000_000)
    share = 80_000_000  # bytes: the weight, and a row of the moments
    resident = psutil.Process().memory_info
    role.train(0)
    before = resident().rss
    role.prepare_saving()
    assert role.writer._task.wait(60)
    assert 0.95 * share < resident().rss - before < 1.2 * share
    memory = role.writer._memory._memory
    role.train(1)
    taken = resident().rss
    store = RunStateStore(tmp_path)
    save(store, role, 1)
    assert resident().rss - taken < 0.1 * share
    assert role.writer._memory._memory is memory
    store.finish()
    assert step_in(newest(store), numbers=10_000_000) == 1


def test_without_memory_for_a_copy_the_step_waits_and_it_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(worker_state, "available_bytes", lambda: 100_000)
    store, role = RunStateStore(tmp_path), Role()
    for step in (1, 2):
        role.train(step)
        save(store, role, step)
        assert role.writer._task is None  # the share is on the disk
        role.train(9)
    store.finish()
    assert step_in(newest(store)) == 2
    assert role.writer._memory.size == 0
    (told,) = [record.getMessage() for record in caplog.records]
    assert "97.66 KiB are free: training waits until" in told


def _save_slowly(root: str, numbers: int) -> None:
    """States 2, 3, ... in the background; blocks of a file come slowly."""
    durable._BLOCK = 4096
    write = durable._File.write

    def slowly(file, data) -> int:
        time.sleep(0.0005)
        return write(file, data)

    durable._File.write = slowly
    store, role = RunStateStore(root, save_last_k=2), Role(numbers=numbers)
    for step in range(2, 1_000_000):
        role.train(step)
        save(store, role, step)
        while store.is_saving:
            role.train(10**6)  # as fast as it can
            store.check()


@pytest.mark.integration
def test_killed_while_the_writer_works_nothing_older_is_lost(tmp_path):
    numbers = 50_000
    store, role = RunStateStore(tmp_path, save_last_k=2), Role(numbers=numbers)
    role.train(1)
    save(store, role, 1)
    store.finish()
    child = FORKSERVER.Process(target=_save_slowly, args=(str(tmp_path), numbers))
    child.start()
    try:
        deadline = time.monotonic() + 60
        while not any(state.step >= 3 for state in store.states()):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        while not list(tmp_path.glob(".tmp-step_*/role/*")):
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.02))
    finally:
        child.kill()
        child.join()
    seen = sorted(int(path.name[-6:]) for path in tmp_path.glob("step_*"))
    assert step_in(newest(store), numbers=numbers) == seen[-1]
    assert [step_in(state.path, numbers=numbers) for state in store.states()] == seen
    assert len(seen) >= 2
    assert not list(tmp_path.glob(".*"))


def writing() -> list[str]:
    """Threads that write run states; other tests leave some of Ray's behind."""
    return [each.name for each in threading.enumerate() if "run state" in each.name]


@pytest.mark.parametrize("ending", ["rank_00000.pt", "rank_00000.done.partial", "state.json"])
def test_a_failing_writer_stops_the_run(tmp_path, monkeypatch, ending):
    disk = SlowDisk(monkeypatch, ending, errno.ENOSPC)
    learner = Counter({3: disk.gate.set})
    with pytest.raises(StorageError, match=r"No space left on device.*not saved"):
        run(tmp_path, learner, total=500)
    assert 3 <= len([kind for kind, _ in learner.calls if kind == "step"]) < 500
    assert not list((tmp_path / "run_state").iterdir())
    assert not writing()


def test_the_end_of_a_run_and_a_signal_wait_for_the_writer(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)

    def stop() -> None:
        assert disk.began.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.2, disk.gate.set).start()

    assert run(tmp_path, Counter({3: stop}), total=9)[0] is False
    assert [state.step for state in RunStateStore(tmp_path / "run_state").states()] == [2, 3]
    assert not list((tmp_path / "run_state").glob(".*"))
    disk.gate.clear()
    learner = Counter({5: lambda: threading.Timer(0.2, disk.gate.set).start()})
    assert run(tmp_path, learner, total=5)[0] is True
    assert [state.step for state in RunStateStore(tmp_path / "run_state").states()] == [4, 5]
    waited = [line.get("timers/save") for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert waited[:3] == [None] * 3  # the line of step 2 came before its state
    assert waited[3] >= 0


def test_after_another_error_the_state_is_written_to_its_end(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)

    def fail() -> None:
        threading.Timer(0.2, disk.gate.set).start()
        raise RuntimeError("the reward function")

    with pytest.raises(RuntimeError, match="the reward function"):
        run(tmp_path, Counter({3: fail}), total=9)
    assert [state.step for state in RunStateStore(tmp_path / "run_state").states()] == [2]
    assert len(lines(tmp_path)) == 3


@pytest.mark.usefixtures("interrupts")
def test_a_second_ctrl_c_does_not_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_BLOCK", 256)
    monkeypatch.setattr(durable.zlib, "crc32", lambda *args: time.sleep(0.2) or 0)

    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(stopping, "_ECHO_S", 0.0)
        os.kill(os.getpid(), signal.SIGINT)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Counter({3: interrupt_twice}))
    assert time.monotonic() - started < 5  # the file has 20 kB
    assert not writing()
    assert not RunStateStore(tmp_path / "run_state").states()


def run_ranks(size: int, work) -> list:
    """What ``work(rank, exchange)`` returns or raises on each rank, which is a thread."""
    barrier, given = threading.Barrier(size, timeout=30), [None] * size

    def one(rank: int):
        def exchange(mine):
            given[rank] = mine
            barrier.wait()
            everything = list(given)
            barrier.wait()
            return everything

        try:
            return work(rank, exchange)
        except AlignerError as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def test_a_state_gets_its_name_when_the_last_rank_is_done(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch, "rank_00001.pt")

    def work(rank: int, exchange) -> bool:
        store = RunStateStore(tmp_path, rank=rank, exchange=exchange)
        role = Role(rank, 3)
        role.train(1)
        save(store, role, 1)
        role.train(2)
        role.writer._task.wait() if rank != 1 else disk.began.wait(30)
        exchange(None)
        store.check()
        unnamed = store.is_saving and not store.states()
        exchange(None)
        disk.gate.set()
        store.finish()
        return unnamed and step_in(store.path(1), 3) == 1

    assert run_ranks(3, work) == [True] * 3
    with open(tmp_path / "step_000001" / "role" / "rank_00001.pt", "r+b") as share:
        share.truncate(50)
    assert newest(RunStateStore(tmp_path)) is None


@pytest.mark.parametrize("in_background", [True, False])
def test_what_one_rank_cannot_write_is_raised_on_all_and_removed(
    tmp_path, monkeypatch, in_background
):
    disk = SlowDisk(monkeypatch, "rank_00001.pt", errno.ENOSPC)
    if not in_background:
        disk.gate.set()

    def work(rank: int, exchange) -> None:
        store = RunStateStore(tmp_path, rank=rank, exchange=exchange)
        role = Role(rank, 2)
        role.num_shares = 2 if in_background else 0  # rank 0 does not wait for the missing share
        save(store, role, 1, in_background)
        store.check()
        disk.gate.set()
        store.finish()

    errors = run_ranks(2, work)
    assert all(isinstance(error, StorageError) for error in errors)
    assert all("No space left on device" in str(error) for error in errors)
    assert "rank 1" in str(errors[0])
    assert list(tmp_path.iterdir()) == []
    assert not writing()


def test_a_worker_touches_nothing_once_its_mark_is_there(tmp_path, monkeypatch):
    folder = tmp_path / ".tmp-step_000001" / "role"
    folder.mkdir(parents=True)
    sealed = threading.Event()
    replace = os.replace

    def slow(source, target):
        replace(source, target)
        if str(target).endswith(".done"):
            assert sealed.wait(30)

    monkeypatch.setattr(os, "replace", slow)
    with ThreadPoolExecutor(1) as threads:
        share = {"x": torch.zeros(10)}
        writing_share = threads.submit(worker_state._write_share, folder, 0, share)
        worker_state.seal(folder, 1)
        folder.parent.rename(tmp_path / "step_000001")
        sealed.set()
        assert writing_share.exception(30) is None
