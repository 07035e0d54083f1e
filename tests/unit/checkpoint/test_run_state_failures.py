"""Run state when things go wrong: full disks, other ranks, and SIGKILL at any moment."""

import errno
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from newest_state import newest
from ranks import FORKSERVER

from aligner.checkpoint import durable
from aligner.checkpoint.run_state import files as state_files
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.errors import AlignerError, StorageError


def state_of(step: int, numbers: int = 100_000) -> dict:
    weight = torch.full((numbers,), float(step)) + torch.arange(numbers)
    return {"policy": {"weight": weight}, "counters": {"step": step}}


def assert_complete(path: Path, numbers: int = 100_000) -> int:
    """The state at ``path`` is bit-equal to what was saved; returns its step."""
    loaded = RunStateStore(path.parent).load(path)
    expected = state_of(loaded.step, numbers)
    assert torch.equal(loaded.state["policy"]["weight"], expected["policy"]["weight"])
    assert loaded.state["counters"] == expected["counters"]
    return loaded.step


# Disk full and unwritable directories


def _save_with_size_limit(root: str, limit: int, answer) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        RunStateStore(root).save(2, state_of(2))
    except StorageError as error:
        answer.put((str(error), error.errno))
    else:
        answer.put(("saved", 0))


@pytest.mark.integration
def test_a_write_that_fails_half_way_leaves_the_previous_state(tmp_path):
    RunStateStore(tmp_path).save(1, state_of(1))
    answer = FORKSERVER.SimpleQueue()
    child = FORKSERVER.Process(target=_save_with_size_limit, args=(str(tmp_path), 150_000, answer))
    child.start()
    message, number = answer.get()
    child.join()
    assert number == errno.EFBIG
    file = str(tmp_path / ".tmp-step_000002" / "policy.pt")
    for part in (file, "bytes) needed", "bytes) free", "intact"):
        assert part in message
    assert [child.name for child in tmp_path.iterdir()] == ["step_000001"]
    assert assert_complete(newest(RunStateStore(tmp_path))) == 1


def disk_is_full(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("module", "name", "replacement", "message"),
    [
        (durable, "free_bytes", lambda path: 399_999, r"390\.62 KiB \(399999 bytes\) free"),
        (state_files, "sync_tree", disk_is_full, "No space left on device"),
    ],
    ids=["before anything is written", "while the manifest is flushed"],
)
def test_a_full_disk(tmp_path, monkeypatch, module, name, replacement, message):
    RunStateStore(tmp_path).save(1, state_of(1))
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(StorageError, match=message) as caught:
        RunStateStore(tmp_path).save(2, state_of(2))
    assert caught.value.errno == errno.ENOSPC
    assert [child.name for child in tmp_path.iterdir()] == ["step_000001"]


def test_unwritable_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/states.*explicit_log_dir"):
        RunStateStore(tmp_path / "file" / "states").save(1, state_of(1))


# Several ranks, as threads


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


@pytest.mark.parametrize("failing", [None, 1])
def test_ranks_write_their_shares_or_all_raise_and_nothing_is_committed(tmp_path, failing):
    def work(rank: int, exchange) -> bool:
        class Role:
            num_shares = 0

            def begin_saving(self, folder, in_background):
                folder.mkdir(exist_ok=True)
                (folder / f"rank{rank}").write_text("share")
                if rank == failing:
                    raise OSError(errno.ENOSPC, "No space left on device")

            def check_saving(self, wait):
                """Nothing is written in the background."""

        store = RunStateStore(tmp_path, rank=rank, exchange=exchange)
        path = store.save(1, state_of(1), roles={"role": Role()})
        return newest(store) == path and store.load(path).state["counters"] == {"step": 1}

    results = run_ranks(2, work)
    if failing is not None:
        assert all(isinstance(error, StorageError) for error in results)
        assert "rank 1" in str(results[0])
        assert list(tmp_path.iterdir()) == []
        return
    assert results == [True] * 2
    state = tmp_path / "step_000001"
    shares = {"role/rank0", "role/rank1", "role/checksums.json"}
    names = {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}
    assert names == shares | {"manifest.json", "state.json", "policy.pt"}
    (state / "role" / "rank1").write_text("sh")
    assert newest(RunStateStore(tmp_path)) is None  # a share that is not whole


# SIGKILL and power


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_old_state_goes(
    tmp_path, monkeypatch
):
    RunStateStore(tmp_path, save_top_k=0).save(1, state_of(1, 10))
    events = []

    def spy(module, name: str, shown) -> None:
        real = getattr(module, name)

        def call(*args, **kwargs):
            events.append((name, shown(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    spy(os, "fsync", lambda file: os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
    spy(os, "rename", lambda old, new: f"{old.name} {new.name}")
    RunStateStore(tmp_path, save_top_k=0).save(2, state_of(2, 10))
    named = events.index(("rename", ".tmp-step_000002 step_000002"))
    flushed = {what for name, what in events[:named] if name == "fsync"}
    assert flushed == {"manifest.json", "state.json", "policy.pt", ".tmp-step_000002"}
    assert events[named + 1] == ("fsync", tmp_path.name)
    assert events[named + 2] == ("rename", "step_000001 .del-step_000001")


def _save_and_die_at_call(root: str, fatal_call: int) -> None:
    """Save steps 2 and (again) 2, killing this process just before the n-th critical call."""
    calls = 0

    def deadly(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fatal_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for module, name in ((os, "fsync"), (os, "rename"), (state_files.shutil, "rmtree")):
        setattr(module, name, deadly(getattr(module, name)))
    store = RunStateStore(root, save_top_k=0)
    for _ in range(2):
        store.save(2, state_of(2, 10))


@pytest.mark.integration
def test_killed_at_every_critical_call_a_complete_state_remains(tmp_path):
    """Exhaustive: before each fsync, rename and removal of a save, a replacement and a clean-up."""
    survived = set()
    for fatal_call in range(1, 100):
        root = tmp_path / str(fatal_call)
        RunStateStore(root).save(1, state_of(1, 10))
        child = FORKSERVER.Process(target=_save_and_die_at_call, args=(str(root), fatal_call))
        child.start()
        child.join()
        survived.add(assert_complete(newest(RunStateStore(root)), 10))
        assert not list(root.glob(".*"))
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert child.exitcode == 0
    assert fatal_call > 15
    assert survived == {1, 2}
