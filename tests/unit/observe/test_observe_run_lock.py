"""A run directory has one writer, and a killed writer keeps nobody out."""

import os
import time

import pytest
from ranks import FORKSERVER

from aligner.errors import StorageError
from aligner.observe.metrics import MetricsWriter
from aligner.observe.run_lock import RunLock

pytestmark = pytest.mark.integration


def _hold(folder: str, ready, fork: bool) -> None:
    lock = RunLock(folder)
    child = os.fork() if fork else None
    if child != 0:
        ready.put(child)
    time.sleep(60)
    lock.release()


def start_holder(folder, fork: bool = False):
    ready = FORKSERVER.SimpleQueue()
    holder = FORKSERVER.Process(target=_hold, args=(folder, ready, fork))
    holder.start()
    return holder, ready.get()


def test_a_second_process_is_refused_with_the_first_ones_pid(tmp_path):
    holder, _ = start_holder(tmp_path)
    try:
        with pytest.raises(StorageError, match=rf"pid {holder.pid}\).*explicit_log_dir"):
            RunLock(tmp_path, patience=0.1)
    finally:
        holder.kill()
        holder.join()
    writer = MetricsWriter(tmp_path)  # killed: let in at once
    writer.close()


def test_released_and_removed_locks_are_taken_anew(tmp_path):
    lock = RunLock(tmp_path)
    (tmp_path / ".lock").unlink()
    assert not lock._acquired()
    assert (tmp_path / ".lock").exists()
    assert lock._acquired()
    lock.release()
    writer = MetricsWriter(tmp_path)
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    writer.close()
    holder, _ = start_holder(tmp_path)
    holder.kill()
    holder.join()


def test_a_forked_child_that_outlives_the_run_does_not_hold_the_lock(tmp_path):
    holder, orphan = start_holder(tmp_path, fork=True)
    holder.kill()
    holder.join()
    try:
        RunLock(tmp_path, patience=0.5).release()
    finally:
        os.kill(orphan, 9)


def test_waits_for_a_run_that_is_just_ending(tmp_path):
    holder, _ = start_holder(tmp_path)
    start = time.monotonic()
    with pytest.raises(StorageError):
        RunLock(tmp_path, patience=0.3)
    assert time.monotonic() - start >= 0.3
    holder.kill()
    RunLock(tmp_path, patience=10).release()
    holder.join()
