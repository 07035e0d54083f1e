"""The process behind a worker on Ray: its log, its environment, and the calls of its methods.

It may run in an interpreter that has little more than Ray, so only the standard library is imported
here; a worker's own module brings what the worker needs.
"""

import os
import pickle
import pkgutil
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aligner.errors import AlignerError

if TYPE_CHECKING:
    from aligner.config import ParallelConfig


@dataclass(frozen=True)
class Seat:
    """Place of a worker, which names it in messages."""

    role: str
    rank: int
    host: str
    node_id: str
    pid: int
    log: str

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} (node {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class TorchWorld:
    """The torch.distributed world of a group of trainers: its layout and where rank 0 listens."""

    parallel: "ParallelConfig"
    seed: int
    timeout_s: float
    world_size: int
    host: str
    port: int


class Failure(Exception):
    """Error raised by a worker, on its way to the driver.

    ``error`` is the exception itself where it is ours and survives being sent.
    """

    def __init__(self, words: str, trace: str, error: AlignerError | None) -> None:
        super().__init__(words, trace, error)
        self.words, self.trace, self.error = words, trace, error

    def __str__(self) -> str:
        return f"{self.words}\n{self.trace}".rstrip()


class WorkerProcess:
    """One Ray actor; holds the worker object and calls it."""

    def __init__(
        self,
        role: str,
        rank: int,
        log: str,
        folder: str,
        environment: Mapping[str, str],
        workers_here: int,
    ) -> None:
        """Before anything heavy is imported: log, environment, folder and thread count.

        ``workers_here``: workers of this group on this node, which compute at the same time.
        """
        self._role, self._rank, self._log = role, rank, log
        _write_output_to(log)
        os.environ.update(environment)
        if "OMP_NUM_THREADS" not in environment:  # Ray has set one by the CPUs it reserved
            cores = len(os.sched_getaffinity(0))
            os.environ["OMP_NUM_THREADS"] = str(max(1, cores // workers_here))
        if os.path.isdir(folder):
            os.chdir(folder)
        if folder not in sys.path:
            sys.path.append(folder)
        self._kept: socket.socket | None = None
        self._worker: Any = None
        self._has_world = False

    def seat(self) -> Seat:
        """Place of this process."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Seat(self._role, self._rank, socket.gethostname(), node, os.getpid(), self._log)

    def free_port(self) -> tuple[str, int]:
        """Address of this node and a port on it, kept from others while this process lives.

        The socket is bound and never listens: with SO_REUSEADDR on both, rank 0's store may.
        """
        import ray

        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("", 0))
        return ray.util.get_node_ip_address(), int(self._kept.getsockname()[1])

    def start(
        self,
        worker_class: str,
        given: tuple[Sequence[Any], Mapping[str, Any]],
        place: Mapping[str, str],
        world: TorchWorld | None,
    ) -> None:
        """Construct the worker; with a ``world``, join it first and pass ``parallel``.

        ``given``: its arguments. ``place``: RANK and its kin. Raises `Failure`.
        """
        os.environ.update(place)
        try:
            positional, keywords = given
            keywords = dict(keywords)
            if world is not None:
                keywords["parallel"] = _join(world)
                self._has_world = True
            constructor = pkgutil.resolve_name(":".join(worker_class.rsplit(".", 1)))
            self._worker = constructor(*positional, **keywords)
        except Exception as error:
            raise _failure(error) from None

    def call(self, method_name: str, step: int, kwargs: Mapping[str, Any], *data: Any) -> Any:
        """Call the worker's method and return its result on the host.

        ``step``: the run's, for what the method reports. ``data``: nothing, or the shard.

        Raises:
            Failure: the method raised.
        """
        return self.call_with(
            method_name, step, (), {**kwargs, **({"data": data[0]} if data else {})}
        )

    def call_with(
        self, method_name: str, step: int, given: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call the worker's method with positional arguments; else as `call`."""
        try:
            with _in_step(step):
                result = getattr(self._worker, method_name)(*given, **kwargs)
            if not self._has_world:
                return result
            from aligner.distributed.workers import to_host

            return to_host(result)
        except Exception as error:
            raise _failure(error) from None


def _join(world: TorchWorld) -> Any:
    """Join the world; RANK is in the environment already."""
    os.environ |= {
        "WORLD_SIZE": str(world.world_size),
        "MASTER_ADDR": world.host,
        "MASTER_PORT": str(world.port),
    }
    from aligner.parallel.groups import initialize_parallel

    return initialize_parallel(world.parallel, seed=world.seed, timeout_s=world.timeout_s)


def _in_step(step: int) -> AbstractContextManager[None]:
    """Attribute errors inside the block to this step; outside of steps torch need not be there."""
    if step == 0:
        return nullcontext()
    from aligner.distributed.step import training_step

    return training_step(step)


def _write_output_to(log: str) -> None:
    """Append all output of this process to ``log``."""
    os.makedirs(os.path.dirname(log), exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _failure(error: Exception) -> Failure:
    trace = traceback.format_exc()
    print(trace, file=sys.stderr, flush=True)
    own = None
    if isinstance(error, AlignerError):
        try:
            own = pickle.loads(pickle.dumps(error))
        except Exception:  # it goes as words
            own = None
    return Failure(f"{type(error).__name__}: {error}", trace, own)
