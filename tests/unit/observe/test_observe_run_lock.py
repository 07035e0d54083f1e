"""A run directory has one writer, and a killed writer keeps nobody out."""

import os
import time

import pytest
from ranks import FORKSERVER

from aligner.errors import StorageError
from aligner.observe.metrics import MetricsWriter
from aligner.observe.run_lock import RunLock

pytestmark = pytest.mark.integration


def _hold(folder: str, ready) -> None:
    """Hold the lock, with a forked child that outlives this process."""
    lock = RunLock(folder)
    child = os.fork()
    if child != 0:
        ready.put(child)
    time.sleep(60)
    lock.release()


def test_a_second_process_waits_and_is_refused_until_the_first_one_ends(tmp_path):
    ready = FORKSERVER.SimpleQueue()
    holder = FORKSERVER.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    orphan = ready.get()
    try:
        start = time.monotonic()
        with pytest.raises(StorageError, match=rf"pid {holder.pid}\).*explicit_log_dir"):
            RunLock(tmp_path, patience=0.3)
        assert time.monotonic() - start >= 0.3
        holder.kill()
        RunLock(tmp_path, patience=10).release()
        holder.join()
        RunLock(tmp_path, patience=0.0).release()
    finally:
        holder.kill()
        os.kill(orphan, 9)


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
