"""The device seam: the only file that knows whether there is a GPU.

All other modules get the device, the collective backend, memory figures and RNG state from here.
It also holds what megatron-core needs to run on a machine without a GPU: the few CUDA calls that
its GPT path makes unconditionally are answered by the CPU (`prepare_megatron`), and literal
``device="cuda"`` arguments in its optimizer are redirected while that optimizer runs
(`cuda_literals`).
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aligner.device import megatron_substitutes
from aligner.device.host_memory import (
    available_bytes,
    keep_freed_memory,
    peak_resident_bytes,
    private_memory,
    reset_peak_resident,
    resident_bytes,
    reuse_pages,
    total_bytes,
)

_DETERMINISTIC = "ALIGNER_DETERMINISTIC"  # of the environment
# Environment variable, 1 where other processes compute on this process's device, in turns.
SHARED_DEVICE = "ALIGNER_SHARED_DEVICE"
_IPC_DEVICE = 6  # place of the device's number among the arguments that rebuild a CUDA tensor


_left_to_others = False  # the GPUs of this machine; see `gpus_left_to_others`


@functools.cache
def has_gpu() -> bool:
    """Return whether a CUDA device can be used; ``ALIGNER_FORCE_CPU=1`` hides it."""
    if _left_to_others or os.environ.get("ALIGNER_FORCE_CPU") == "1":
        return False
    return torch.cuda.is_available()


@contextlib.contextmanager
def gpus_left_to_others() -> Iterator[None]:
    """A block in which this process computes on the CPU, GPU or not.

    Any query of a GPU makes a context on it, half a GiB that the worker who owns it lacks.
    """
    global _left_to_others
    _left_to_others = True
    has_gpu.cache_clear()
    try:
        yield
    finally:
        _left_to_others = False
        has_gpu.cache_clear()


def has_fp8() -> bool:
    """Return whether the device multiplies 8-bit floating-point matrices."""
    return has_gpu() and torch.cuda.get_device_capability() >= (8, 9)


def device() -> torch.device:
    """The device this process computes on."""
    if has_gpu():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend for `device`."""
    return "nccl" if has_gpu() else "gloo"


def nccl_version() -> tuple[int, ...] | None:
    """Version of the NCCL that torch brings; None on CPU, where nothing uses it."""
    return torch.cuda.nccl.version()[:3] if has_gpu() else None


def activate() -> None:
    """Make `device` the current one of this process, and its operations repeatable if chosen."""
    if not has_gpu():
        return
    torch.cuda.set_device(device())
    if os.environ.get(_DETERMINISTIC) == "1":
        # What cuBLAS, NCCL and Transformer Engine read when they start.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads it


def synchronize() -> None:
    """Wait for all queued device work."""
    if has_gpu():
        torch.cuda.synchronize()


def release_memory() -> None:
    """Return cached device memory to the driver."""
    if has_gpu():
        torch.cuda.empty_cache()


def release_shared_memory() -> None:
    """`release_memory` where other processes take turns on the device (`SHARED_DEVICE`).

    A single process uses its cached blocks again, which is quicker than allocating them anew.
    """
    if os.environ.get(SHARED_DEVICE) == "1":
        release_memory()


def free_memory_bytes() -> int:
    """Device memory that can still be allocated; on CPU the machine's available memory."""
    if has_gpu():
        return torch.cuda.mem_get_info()[0]
    return available_bytes()


def total_memory_bytes() -> int:
    """Memory of the device; on CPU the machine's."""
    return torch.cuda.mem_get_info()[1] if has_gpu() else total_bytes()


def description() -> str:
    """The device in words."""
    if has_gpu():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


@dataclass(frozen=True)
class DeviceInfo:
    """Description of a worker's device, for the start-up report."""

    description: str
    has_gpu: bool
    free_bytes: int


def device_info() -> DeviceInfo:
    """Description of this process's device, now."""
    return DeviceInfo(description(), has_gpu(), free_memory_bytes())


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one process, in bytes: on its GPU by torch's count, else resident on its machine.

    ``process`` and ``device`` name both among those of all machines.
    """

    process: str
    device: str
    has_gpu: bool
    allocated: int  # by tensors, at most since `reset_peak_memory`; without a GPU, resident
    reserved: int  # from the driver, at most since then; without a GPU, resident
    held: int  # now
    free: int  # of the device, now
    total: int  # of the device


def memory_use() -> MemoryUse:
    """Memory use of this process: its peaks since `reset_peak_memory`, and its present memory."""
    host = os.uname().nodename
    process = f"{host} {os.getpid()}"
    if not has_gpu():
        peak = peak_resident_bytes()
        now, free = resident_bytes(), available_bytes()
        return MemoryUse(process, host, False, peak, peak, now, free, total_bytes())
    free, total = torch.cuda.mem_get_info()
    return MemoryUse(
        process,
        f"{host} {sharing_key()}",
        True,
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
        torch.cuda.memory_reserved(),
        free,
        total,
    )


def reset_peak_memory() -> None:
    """Begin to look for peaks anew; on some machines without a GPU they remain those of before."""
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak_resident()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or the text of one raised elsewhere, is a failed allocation."""
    words = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in words for text in ("out of memory", "can't allocate memory", "memoryerror")
    )


def generator_state() -> Tensor | None:
    """State of the device's random generator, uint8 [n]; None on CPU, which has torch's own."""
    return torch.cuda.get_rng_state() if has_gpu() else None


def set_generator_state(state: Tensor | None) -> None:
    """Restore ``state``, uint8 [n]; inverse of `generator_state`."""
    if has_gpu() and state is not None:
        torch.cuda.set_rng_state(state)


def rng_state() -> dict[str, Any]:
    """`generator_state` under ``generator``; states that megatron-core keeps under ``tracker``.

    The latter, uint8 [n] each, are for dropout of tensors that tensor-parallel ranks have different
    parts of.
    """
    return {"generator": generator_state(), "tracker": dict(_rng_tracker().get_states())}


def set_rng_state(state: Mapping[str, Any] | Tensor | None) -> None:
    """Inverse of `rng_state`; earlier versions saved only the `generator_state`, uint8 [n]."""
    if not isinstance(state, Mapping):
        set_generator_state(state)
        return
    set_generator_state(state["generator"])
    tracker = _rng_tracker()
    saved = {name: each.clone() for name, each in state["tracker"].items()}
    tracker.set_states({**tracker.get_states(), **saved})


def _rng_tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def make_deterministic() -> None:
    """Choose operations whose results repeat, for this process and those that it starts.

    `activate` reads the choice, before anything is computed.
    """
    os.environ[_DETERMINISTIC] = "1"


def is_deterministic() -> bool:
    """Return whether operations whose results repeat were chosen; on CPU all are such."""
    return not has_gpu() or torch.are_deterministic_algorithms_enabled()


def is_apart(tensor: Tensor) -> bool:
    """Return whether a tensor of any shape and dtype is in memory that the host does not use."""
    return tensor.is_cuda


def copy_memory(size: int) -> memoryview:
    """``size`` bytes of host memory for copies of device memory; locked beside a GPU.

    Where the system refuses to lock them, copies are slower and right. They are unlocked before
    they go back to the system, which happens when the last view is gone.
    """
    memory = private_memory(size)
    if has_gpu():
        runtime = torch.cuda.cudart()
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        if int(runtime.cudaHostRegister(address, size, 0)) == 0:
            mapped: Any = memory.obj
            mapped.unlock = functools.partial(runtime.cudaHostUnregister, address)
        else:  # the next kernel raises the error that this left behind, once
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device())
    return memory


def to_device(tensor: Tensor, where: torch.device | None = None) -> Tensor:
    """Move a tensor of any shape and dtype to ``where``, by default `device`.

    One that is there already is returned as is. The host does not wait for the device.
    """
    return tensor.to(where or device(), non_blocking=True)


class HostCopy:
    """Copies of tensors on their way to the host, as they are now; later changes do not count."""

    def __init__(self, *tensors: Tensor) -> None:
        """``tensors``: of any shape and dtype."""
        self._done: torch.cuda.Event | None = None
        if any(each.is_cuda for each in tensors):
            self._copies = [
                torch.empty_like(each, device="cpu", pin_memory=True).copy_(each, non_blocking=True)
                for each in tensors
            ]
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._copies = [each.clone() for each in tensors]

    def wait(self) -> list[Tensor]:
        """The copies, once the device has made them; later work may still run."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies


def graph_memory() -> Any:
    """A name for memory that graphs share; it is theirs until the last of them is gone."""
    return torch.cuda.graph_pool_handle() if has_gpu() else None


def capture(function: Callable[[], None], memory: Any) -> Callable[[], None]:
    """Capture the kernels that ``function`` launches, as one launch: a CUDA graph, for GPUs.

    It is not run yet. It must not read a value of the device, and what it changes must be tensors
    from before; what it allocates lives as long as the graph. Graphs that share a `graph_memory`
    must be launched one after the other, and leave nothing there for one another.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # `torch.cuda.graph` would wait for the device and return all cached memory to the driver first.
    with torch.cuda.stream(stream):
        # Other threads, such as those that watch over collectives, may go on calling the driver.
        graph.capture_begin(memory, capture_error_mode="thread_local")
        try:
            function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def sharing_key() -> str:
    """Name of the GPU, or of the machine, which processes must have in common to share memory."""
    if has_gpu():
        return f"GPU {torch.cuda.get_device_properties(device()).uuid}"
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"machine {file.read().strip()}"


def export_tensor(tensor: Tensor) -> Any:
    """Picklable handle by which another process opens a GPU tensor of this one (CUDA IPC).

    ``tensor``: of any shape and dtype.
    """
    from torch.multiprocessing.reductions import reduce_tensor  # changes how tensors pickle

    return reduce_tensor(tensor)


def import_tensor(exported: Any) -> Tensor:
    """The tensor another process exported; its device may have another number here."""
    rebuild, arguments = exported
    values = list(arguments)
    values[_IPC_DEVICE] = device().index
    return rebuild(*values)


def gpu_profiler(action: str) -> None:
    """Start or stop the CUDA profiler's capture range; nothing without a GPU."""
    if has_gpu():
        {"start": torch.cuda.profiler.start, "stop": torch.cuda.profiler.stop}[action]()


class _CudaLiterals(TorchFunctionMode):
    """Read ``device="cuda"`` as the CPU and ``tensor.type()`` as the CUDA type of the same name."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def cuda_literals() -> contextlib.AbstractContextManager[Any]:
    """Context in which megatron-core's optimizer code, which names "cuda", works on this device."""
    return contextlib.nullcontext() if has_gpu() else _CudaLiterals()


@functools.cache
def prepare_megatron() -> None:
    """Let megatron-core run on this machine, GPU or not; call before its first use. Idempotent.

    megatron-core queries the current CUDA device, synchronises and keeps CUDA random states even
    where tensors live on the CPU. Their CPU counterparts stand in for these calls. Its router
    reads a name that only exists beside Transformer Engine, on a GPU too.
    """
    megatron_substitutes.define_router_gemm()
    megatron_substitutes.clip_in_place()
    if has_gpu():
        megatron_substitutes.fuse_gradient_norm()
        return
    keep_freed_memory()
    reuse_pages()
    cpu = torch.device("cpu")

    def set_cpu_rng_state(new_state: Tensor, device: int = -1, graph_safe: bool = False) -> None:
        del device, graph_safe  # there is one CPU generator and no CUDA graph
        torch.set_rng_state(new_state)

    torch.cuda.current_device = lambda: cpu
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state

    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._set_cuda_rng_state = set_cpu_rng_state
    megatron_substitutes.free_dispatcher_of_stream()


@contextlib.contextmanager
def deterministic_seed(seed: int) -> Iterator[None]:
    """Run a block under its own seed and leave the process's random state as it was."""
    cpu_state, device_state = torch.get_rng_state(), generator_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        set_generator_state(device_state)
