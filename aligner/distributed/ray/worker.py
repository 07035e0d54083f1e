"""Ray actor that contains a worker: sets up its process, and calls its methods.

This module imports only the standard library and `aligner.errors`, because a worker's interpreter
may have few packages.
"""

import contextlib
import os
import pickle
import pkgutil
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aligner.errors import AlignerError, training_step

if TYPE_CHECKING:
    from aligner.config import ParallelConfig


@dataclass(frozen=True)
class WorkerIdentity:
    """Role, rank and process of a worker, for error messages."""

    role: str  # such as "policy"
    rank: int  # in the worker group
    host: str
    node_id: str  # Ray's id of the node
    pid: int
    log: str  # path of the worker's log

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} (node {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class TorchWorld:
    """Layout of a worker group that uses torch.distributed, and the address of its rank 0."""

    parallel: "ParallelConfig"
    seed: int
    timeout_s: float
    world_size: int
    host: str
    port: int


class WorkerFailure(Exception):
    """An exception in a worker, as text. ``error`` is a picklable `AlignerError` or None."""

    def __init__(self, message: str, trace: str, error: AlignerError | None) -> None:
        super().__init__(message, trace, error)
        self.message, self.trace, self.error = message, trace, error

    def __str__(self) -> str:
        return f"{self.message}\n{self.trace}".rstrip()


class WorkerProcess:
    """Ray actor that contains one worker object and calls its methods."""

    def __init__(
        self,
        role: str,
        rank: int,
        log: str,
        folder: str,
        environment: Mapping[str, str],
        workers_on_node: int,  # of this group
    ) -> None:
        self._role, self._rank, self._log = role, rank, log
        _write_output_to(log)
        os.environ.update(environment)
        if "OMP_NUM_THREADS" not in environment:  # Ray's value is the number of reserved CPUs
            cores = len(os.sched_getaffinity(0))
            os.environ["OMP_NUM_THREADS"] = str(max(1, cores // workers_on_node))
        # Relative paths and modules of the driver's working directory.
        if os.path.isdir(folder):
            os.chdir(folder)
        if folder not in sys.path:
            sys.path.append(folder)
        self._reserved_socket: socket.socket | None = None
        self._worker: Any = None
        self._has_world = False

    def identity(self) -> WorkerIdentity:
        """Return the role, rank and process of this worker."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return WorkerIdentity(
            self._role, self._rank, socket.gethostname(), node, os.getpid(), self._log
        )

    def free_port(self) -> tuple[str, int]:
        """Return this node's address and a free port, which is reserved until this process ends."""
        import ray

        # The socket is bound but never listens. With SO_REUSEADDR on both sockets, rank 0's store
        # can listen on the same port.
        self._reserved_socket = socket.socket()
        self._reserved_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved_socket.bind(("", 0))
        return ray.util.get_node_ip_address(), int(self._reserved_socket.getsockname()[1])

    def start(
        self,
        worker_class: str,
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        rank_variables: Mapping[str, str],
        world: TorchWorld | None,
    ) -> None:
        """Join the torch.distributed ``world``, if given, and construct the worker.

        ``arguments``: (positional, keyword) arguments of the worker's constructor.
        ``rank_variables``: environment variables such as RANK. Raises `WorkerFailure` if joining or
        constructing fails.
        """
        os.environ |= rank_variables
        try:
            positional, keywords = arguments
            if world is not None:
                keywords = {**keywords, "parallel": _join(world)}
                self._has_world = True
            constructor = pkgutil.resolve_name(":".join(worker_class.rsplit(".", 1)))
            self._worker = constructor(*positional, **keywords)
        except Exception as error:
            raise _failure(error) from None

    def call(
        self,
        method_name: str,
        step: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *data: Any,
    ) -> Any:
        """Call a method of the worker and return its result, with tensors in host memory.

        ``step``: training step, for messages. ``data``: the worker's shard, if any, which is passed
        as keyword ``data``. Raises `WorkerFailure` if the method raises.
        """
        if data:
            kwargs = {**kwargs, "data": data[0]}
        try:
            with training_step(step):
                result = getattr(self._worker, method_name)(*args, **kwargs)
            if not self._has_world:
                return result
            from aligner.distributed.workers import to_host

            return to_host(result)
        except Exception as error:
            raise _failure(error) from None


def _join(world: TorchWorld) -> Any:
    os.environ |= {
        "WORLD_SIZE": str(world.world_size),
        "MASTER_ADDR": world.host,
        "MASTER_PORT": str(world.port),
    }
    from aligner.parallel.groups import initialize_parallel

    return initialize_parallel(world.parallel, seed=world.seed, timeout_s=world.timeout_s)


def _write_output_to(log: str) -> None:
    os.makedirs(os.path.dirname(log), exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard_descriptor in (1, 2):
        os.dup2(descriptor, standard_descriptor)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _failure(error: Exception) -> WorkerFailure:
    trace = traceback.format_exc()
    print(trace, file=sys.stderr, flush=True)
    sendable = None
    if isinstance(error, AlignerError):
        # An error that cannot be pickled is sent as text.
        with contextlib.suppress(Exception):
            sendable = pickle.loads(pickle.dumps(error))
    return WorkerFailure(f"{type(error).__name__}: {error}", trace, sendable)
