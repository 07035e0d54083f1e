"""Connects to an existing Ray cluster, or starts a cluster that ends with the run.

::

    run ─ ray.init ─► Ray's processes
     └─ pipe, which closes with the run ─► reaper ─ ends them, removes their folder
"""

import contextlib
import logging
import os
import select
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

from aligner.errors import ConfigError, WorkerError, raised_as
from aligner.packages import require_extra

# Short, because paths of sockets below the folder are limited to 107 bytes.
_FOLDER_PREFIX = "aligner-ray-"
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Python processes start slowly on a loaded machine.
    "RAY_worker_register_timeout_seconds": "300",
    # Ray's default gives workers a low priority, but the workers do the computation.
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_ATTEMPTS = 3  # Ray's processes must start within 30 s, too short on a loaded machine
_REAPER_S = 20.0  # time limit of the cleanup


@contextlib.contextmanager
def ray_session(address: str | None, cpus: float, object_store_mb: int) -> Iterator[None]:
    """Context manager: connect to the Ray cluster at ``address`` or ``RAY_ADDRESS``.

    Without an address, a cluster with ``cpus`` CPUs and an object store of ``object_store_mb`` MiB
    is started. It ends with the block or with this process. An existing connection or cluster stays
    open. Raises `ConfigError` if no cluster answers, and `WorkerError` if Ray does not start.
    """
    require_extra("ray", "a connection to Ray")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    address = address or os.environ.get("RAY_ADDRESS")
    with _joined(address) if address else _started(cpus, object_store_mb):
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    import ray

    if address.startswith("ray://"):
        raise ConfigError(
            f"cluster.address={address} (or RAY_ADDRESS): Ray's client (ray://) is not supported. "
            "Run the command on a machine of the cluster, and give the address as host:port"
        )
    text = f"cluster.address={address} (or RAY_ADDRESS): no Ray cluster answers at this address"
    remedy = "start a cluster with `ray start --head`, or set neither to start one in the run"
    with raised_as(ConfigError, text, ConnectionError, RuntimeError, ValueError, remedy=remedy):
        namespace = f"aligner-{uuid.uuid4().hex}"
        ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    yield


@contextlib.contextmanager
def _started(cpus: float, object_store_mb: int) -> Iterator[None]:
    import ray

    # A separate folder, which the cleanup process removes.
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir="/tmp")
    options: dict[str, Any] = {
        # Ray only counts CPUs. Roles compute in turn, so more CPUs than exist are allowed.
        "num_cpus": max(os.cpu_count() or 1, -int(-cpus // 1)),
        "num_gpus": 0 if os.environ.get("ALIGNER_FORCE_CPU") == "1" else None,
        "object_store_memory": object_store_mb * 2**20,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": f"aligner-{uuid.uuid4().hex}",
        "_temp_dir": folder,
    }
    with _reaper(folder):
        for attempt in range(_ATTEMPTS):
            try:
                ray.init("local", **options)
                break
            except Exception as error:
                ray.shutdown()
                if attempt == _ATTEMPTS - 1:
                    raise WorkerError(
                        f"Ray did not start: {error}. Run `ray start --head` to see the cause, "
                        "and set cluster.address"
                    ) from error
        yield


@contextlib.contextmanager
def _reaper(folder: str) -> Iterator[None]:
    """Start a process that cleans up after Ray. At the end of the block, wait until it is done."""
    reaper = subprocess.Popen(
        [sys.executable, "-m", "aligner.distributed.ray.reaper", str(os.getpid()), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # protects it from signals to the run's process group
    )
    reaper.wait()  # its fork continues without a parent
    assert reaper.stdin is not None
    assert reaper.stdout is not None
    with reaper.stdout as output:
        try:
            yield
        finally:
            reaper.stdin.close()
            select.select([output], [], [], _REAPER_S)
