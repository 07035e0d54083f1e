"""A connection to Ray: to an existing cluster, or to one that the run starts and ends."""

import contextlib
import logging
import os
import select
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aligner.errors import ConfigError, WorkerError

# Sockets are named below it, and such names are at most 107 bytes long.
_FOLDER_PREFIX = "aligner-ray-"
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A crowded machine takes long to start a Python process.
    "RAY_worker_register_timeout_seconds": "300",
    # By default Ray's workers yield to all other processes, but they do the computation.
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_ATTEMPTS = 3  # Ray gives its own processes 30 s, which a crowded machine may exceed
_REAPER_S = 20.0  # for the reaper to clear up


@dataclass(frozen=True)
class RayNeeds:
    """Resources of a run on Ray: ``cpus`` of one machine, ``object_store_mb`` for batches."""

    cpus: float
    object_store_mb: int


@contextlib.contextmanager
def ray_session(address: str | None, needs: RayNeeds) -> Iterator[None]:
    """Connect to the cluster at ``address``, else ``RAY_ADDRESS``; with neither, start one here.

    A cluster that was there lives on; what was started is gone when the block ends, and also when
    this process is killed. A program that is connected already keeps its connection.

    Raises:
        ConfigError: there is no cluster at the address.
        WorkerError: Ray did not start.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    address = address or os.environ.get("RAY_ADDRESS")
    with _joined(address) if address else _started(needs):
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    import ray

    if address.startswith("ray://"):
        raise ConfigError(
            f"cluster.address={address} (or RAY_ADDRESS): run the command on a machine of the "
            "cluster and give the address as host:port"
        )
    try:
        ray.init(address, namespace=_namespace(), log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cluster.address={address} (or RAY_ADDRESS): no Ray cluster answers there ({error}); "
            "start one with `ray start --head`, or set neither to have the run start its own"
        ) from error
    yield


@contextlib.contextmanager
def _started(needs: RayNeeds) -> Iterator[None]:
    import ray

    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir="/tmp")
    options: dict[str, Any] = {
        # CPUs are what Ray counts, not what it enforces: roles take turns.
        "num_cpus": max(os.cpu_count() or 1, -int(-needs.cpus // 1)),
        "num_gpus": 0 if os.environ.get("ALIGNER_FORCE_CPU") == "1" else None,
        "object_store_memory": needs.object_store_mb * 2**20,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": _namespace(),
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
                        f"Ray did not start: {error}; start one by hand with `ray start --head` "
                        "to see why, and set cluster.address"
                    ) from error
        yield


@contextlib.contextmanager
def _reaper(folder: str) -> Iterator[None]:
    """Process that clears up when this one ends, killed or not; see `aligner.distributed.ray`."""
    reaper = subprocess.Popen(
        [sys.executable, "-m", "aligner.distributed.ray.reaper", str(os.getpid()), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # signals for the run's process group are not for it
    )
    reaper.wait()  # it goes on as a child of no process
    assert reaper.stdin is not None
    assert reaper.stdout is not None
    with reaper.stdout as done:
        try:
            yield
        finally:
            reaper.stdin.close()
            select.select([done], [], [], _REAPER_S)


def _namespace() -> str:
    return f"aligner-{uuid.uuid4().hex}"
