"""Ports are held from the moment that they are picked until their server listens there."""

import socket
from datetime import timedelta

import pytest
from documented import ROOT
from ranks import run_ranks
from torch.distributed import TCPStore

from aligner.distributed.ray.worker import WorkerProcess

# Files in which a socket tells its port, and keeps it.
ASKING = {
    *("aligner/distributed/ray/worker.py", "aligner/http/listening.py", "benchmarks/plan.py"),
    *("tests/servers.py", "tests/adapters/test_environments_beside_mcp1.py", "tests/test_ports.py"),
}
MEETING = """
import datetime
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
print(dist.get_rank())
"""


def is_kept(port):
    """Nobody else gets the port, and a store may listen there."""
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    limit = timedelta(seconds=20)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=limit)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_the_port_of_workers_on_ray_is_kept():
    pytest.importorskip("ray")
    worker = WorkerProcess.__new__(WorkerProcess)  # its constructor moves this process's output
    is_kept(worker.free_port()[1])
    worker._reserved_socket.close()


def test_ranks_meet_where_others_look_for_ports(tmp_path, monkeypatch):
    """Another process tries to bind the ranks' port before they have imported anything."""
    import ranks

    taken = []
    start = ranks.start_script

    def try_to_take(script, arguments, log, environment):
        with socket.socket() as other:
            try:
                other.bind(("127.0.0.1", int(environment["MASTER_PORT"])))
                taken.append(environment["MASTER_PORT"])
            except OSError:
                pass
        return start(script, arguments, log, environment)

    monkeypatch.setattr(ranks, "start_script", try_to_take)
    script = tmp_path / "script.py"
    script.write_text(MEETING)
    assert [text.split()[-1] for text in run_ranks(script, 2, [], 60)] == ["0", "1"]
    assert not taken


def test_no_port_is_picked_and_let_go():
    """A new place that asks a socket for its number is looked at, and joins the list."""
    folders = ("aligner*", "benchmarks", "campaigns", "examples", "tests")
    files = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    asking = {str(path.relative_to(ROOT)) for path in files if ".getsockname(" in path.read_text()}
    assert asking <= ASKING
