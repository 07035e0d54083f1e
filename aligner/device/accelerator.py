"""The device of this process. No other module knows whether a GPU is present.

All other modules get the device, the collective backend, memory sizes and RNG state from here.
`prepare_megatron` and `cuda_literals` let megatron-core run on a machine without a GPU.
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

# Environment variables.
_DETERMINISTIC = "ALIGNER_DETERMINISTIC"  # 1 requests deterministic operations
SHARED_DEVICE = "ALIGNER_SHARED_DEVICE"  # 1: other processes take turns on this process's device
_IPC_DEVICE = 6  # index of the device among the arguments that rebuild a CUDA tensor

_gpus_hidden = False  # by `gpus_left_to_others`


@functools.cache
def has_gpu() -> bool:
    """Return whether a CUDA device can be used. ``ALIGNER_FORCE_CPU=1`` hides it."""
    if _gpus_hidden or os.environ.get("ALIGNER_FORCE_CPU") == "1":
        return False
    return torch.cuda.is_available()


@contextlib.contextmanager
def gpus_left_to_others() -> Iterator[None]:
    """Compute on the CPU in the block, because any query of a GPU takes half a GiB of it."""
    global _gpus_hidden
    _gpus_hidden = True
    has_gpu.cache_clear()
    try:
        yield
    finally:
        _gpus_hidden = False
        has_gpu.cache_clear()


def has_fp8() -> bool:
    """Return whether the device multiplies 8-bit floating-point matrices."""
    return has_gpu() and torch.cuda.get_device_capability() >= (8, 9)


def device() -> torch.device:
    """Return the device of this process."""
    if has_gpu():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def backend() -> str:
    """Return the torch.distributed backend for `device`."""
    return "nccl" if has_gpu() else "gloo"


def nccl_version() -> tuple[int, ...] | None:
    """Return the version of torch's NCCL, or None on a CPU, which does not use NCCL."""
    return torch.cuda.nccl.version()[:3] if has_gpu() else None


def activate() -> None:
    """Make `device` current, and its operations deterministic after `make_deterministic`."""
    if not has_gpu():
        return
    torch.cuda.set_device(device())
    if os.environ.get(_DETERMINISTIC) == "1":
        # cuBLAS, NCCL and Transformer Engine read these when they start.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # never read


def synchronize() -> None:
    """Wait for all queued device work."""
    if has_gpu():
        torch.cuda.synchronize()


def release_memory() -> None:
    """Return cached device memory to the driver."""
    if has_gpu():
        torch.cuda.empty_cache()


def release_shared_memory() -> None:
    """Call `release_memory` if other processes take turns on the device (`SHARED_DEVICE`)."""
    if os.environ.get(SHARED_DEVICE) == "1":
        release_memory()


def free_memory_bytes() -> int:
    """Return the free memory of the device, on a CPU the available host memory."""
    return torch.cuda.mem_get_info()[0] if has_gpu() else available_bytes()


def total_memory_bytes() -> int:
    """Return the memory of the device, on a CPU the host memory."""
    return torch.cuda.mem_get_info()[1] if has_gpu() else total_bytes()


def description() -> str:
    """Return the name of the device."""
    return torch.cuda.get_device_name() if has_gpu() else f"CPU, {torch.get_num_threads()} threads"


@dataclass(frozen=True)
class DeviceInfo:
    """Description of a worker's device, for the start-up report."""

    description: str
    has_gpu: bool
    free_bytes: int


def device_info() -> DeviceInfo:
    """Describe the device of this process."""
    return DeviceInfo(description(), has_gpu(), free_memory_bytes())


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that torch uses on a process's GPU. Without a GPU, its resident host memory."""

    process: str  # unique over all machines, as is ``device``
    device: str
    has_gpu: bool
    allocated: int  # peak of tensors since `reset_peak_memory`. Without a GPU: resident
    reserved: int  # peak of torch's memory since then. Without a GPU: resident
    current: int  # reserved now
    free: int  # of the device, now
    total: int  # of the device


def memory_use() -> MemoryUse:
    """Return the memory use of this process: peaks since `reset_peak_memory`, and current use."""
    host = os.uname().nodename
    process = f"{host} {os.getpid()}"
    if not has_gpu():
        peak, now = peak_resident_bytes(), resident_bytes()
        return MemoryUse(process, host, False, peak, peak, now, available_bytes(), total_bytes())
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    now, memory = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    return MemoryUse(process, f"{host} {sharing_key()}", True, allocated, reserved, now, *memory)


def reset_peak_memory() -> None:
    """Reset the peaks. Some machines without a GPU do not allow it, and the peaks remain."""
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak_resident()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation, here or in a remote traceback."""
    message = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in message for text in ("out of memory", "can't allocate memory", "memoryerror")
    )


def generator_state() -> Tensor | None:
    """Return the state of the GPU's random generator, uint8 [n]. None without a GPU."""
    return torch.cuda.get_rng_state() if has_gpu() else None


def set_generator_state(state: Tensor | None) -> None:
    """Restore ``state``, uint8 [n], a result of `generator_state`."""
    if has_gpu() and state is not None:
        torch.cuda.set_rng_state(state)


def rng_state() -> dict[str, Any]:
    """Return `generator_state` and, as ``tracker``, megatron-core's tensor-parallel RNG states."""
    return {"generator": generator_state(), "tracker": dict(_rng_tracker().get_states())}


def set_rng_state(state: Mapping[str, Any] | Tensor | None) -> None:
    """Restore a result of `rng_state`, or the `generator_state`, uint8 [n], of old run states."""
    if not isinstance(state, Mapping):
        set_generator_state(state)
        return
    set_generator_state(state["generator"])
    tracker = _rng_tracker()
    saved = {name: value.clone() for name, value in state["tracker"].items()}
    tracker.set_states({**tracker.get_states(), **saved})


def _rng_tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def make_deterministic() -> None:
    """Request deterministic operations, which `activate` applies here and in child processes."""
    os.environ[_DETERMINISTIC] = "1"


def is_deterministic() -> bool:
    """Return whether operations are deterministic, as all operations on a CPU are."""
    return not has_gpu() or torch.are_deterministic_algorithms_enabled()


def is_apart(tensor: Tensor) -> bool:
    """Return whether a tensor of any shape and dtype is in device memory, not in host memory."""
    return tensor.is_cuda


def copy_memory(size: int) -> memoryview:
    """Allocate ``size`` bytes of host memory for copies of device memory, locked on a GPU machine.

    If the system refuses the lock, copies are slower. The memory is freed with its last view.
    """
    memory = private_memory(size)
    if has_gpu():
        runtime = torch.cuda.cudart()
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        if int(runtime.cudaHostRegister(address, size, 0)) == 0:
            mapped: Any = memory.obj
            mapped.unlock = functools.partial(runtime.cudaHostUnregister, address)
        else:  # the failed call makes the next kernel raise an error, once
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device())
    return memory


def to_device(tensor: Tensor, where: torch.device | None = None) -> Tensor:
    """Move a tensor of any shape and dtype to ``where``, by default `device`, without waiting."""
    return tensor.to(where or device(), non_blocking=True)


class HostCopy:
    """Asynchronous copies of tensors to the host. Later changes of the tensors have no effect."""

    def __init__(self, *tensors: Tensor) -> None:
        """Start to copy ``tensors``, of any shape and dtype."""
        self._copied: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._copies = [
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._copies = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[Tensor]:
        """Wait for the copies, not for later work of the device, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copies


def graph_memory() -> Any:
    """Create a handle of memory that graphs share and that lives as long as the graphs."""
    return torch.cuda.graph_pool_handle() if has_gpu() else None


def capture(function: Callable[[], None], memory: Any) -> Callable[[], None]:
    """Capture the kernels of ``function`` as a CUDA graph. Return the function that launches it.

    Capturing runs no kernel. ``function`` must not read a value of the device and may only change
    tensors that exist already. Graphs that share a `graph_memory` must be launched one after the
    other and cannot pass each other values there.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # `torch.cuda.graph` would first wait for the device and return all cached memory to the driver.
    with torch.cuda.stream(stream):
        # Other threads, such as the watchdogs of collectives, may call the driver meanwhile.
        graph.capture_begin(memory, capture_error_mode="thread_local")
        try:
            function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def sharing_key() -> str:
    """Name the GPU, or without one the machine: processes with equal names can share memory."""
    if has_gpu():
        return f"GPU {torch.cuda.get_device_properties(device()).uuid}"
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"machine {file.read().strip()}"


def export_tensor(tensor: Tensor) -> Any:
    """Return a picklable handle (CUDA IPC) of a GPU tensor of any shape and dtype."""
    from torch.multiprocessing.reductions import reduce_tensor  # changes how tensors pickle

    return reduce_tensor(tensor)


def import_tensor(exported: Any) -> Tensor:
    """Open a tensor that another process exported, in which the device may have another index."""
    rebuild, arguments = exported
    values = list(arguments)
    values[_IPC_DEVICE] = device().index
    return rebuild(*values)


def gpu_profiler(action: str) -> None:
    """Start or stop the capture range of the CUDA profiler, if a GPU is present."""
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
    """Let megatron-core's optimizer code, which names "cuda", work on this device in the block."""
    return contextlib.nullcontext() if has_gpu() else _CudaLiterals()


@functools.cache
def prepare_megatron() -> None:
    """Let megatron-core run on this machine, with or without a GPU. Idempotent.

    For tensors on a CPU, megatron-core also queries the current CUDA device, synchronises and
    stores CUDA random states. CPU counterparts replace these calls.
    """
    megatron_substitutes.define_router_gemm()
    if has_gpu():
        megatron_substitutes.fuse_gradient_norm()
        return
    keep_freed_memory()
    reuse_pages()
    cpu = torch.device("cpu")

    def set_cpu_rng_state(new_state: Tensor, device: int = -1, graph_safe: bool = False) -> None:
        del device, graph_safe  # a CPU has one generator and no CUDA graphs
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
    """Run a block with a separate seed, then restore the random state of the process."""
    cpu_state, device_state = torch.get_rng_state(), generator_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        set_generator_state(device_state)
