"""Device of this process, a GPU or the CPU, with its memory, random state and collective backend.

Other modules use this module instead of torch.cuda, and so work on both. `prepare_megatron` and
`cuda_literals` let megatron-core run on a machine without a GPU.
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
SHARED_DEVICE = "ALIGNER_SHARED_DEVICE"  # 1: other processes use the device in turn with this one
_IPC_DEVICE = 6  # index of the device among the arguments that rebuild a CUDA tensor

_gpus_hidden = False  # true in the block of `gpus_left_to_others`


@functools.cache
def has_gpu() -> bool:
    """Return whether a CUDA device can be used. ``ALIGNER_FORCE_CPU=1`` hides it."""
    if _gpus_hidden or os.environ.get("ALIGNER_FORCE_CPU") == "1":
        return False
    return torch.cuda.is_available()


@contextlib.contextmanager
def gpus_left_to_others() -> Iterator[None]:
    """Context manager: use only the CPU. Even an idle process takes 0.5 GiB of GPU memory."""
    global _gpus_hidden
    _gpus_hidden = True
    has_gpu.cache_clear()
    try:
        yield
    finally:
        _gpus_hidden = False
        has_gpu.cache_clear()


def has_fp8() -> bool:
    """Return whether the device supports FP8 matrix multiplication."""
    return has_gpu() and torch.cuda.get_device_capability() >= (8, 9)


def device() -> torch.device:
    """Return the device of this process: the GPU with the index LOCAL_RANK, or the CPU."""
    if has_gpu():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def backend() -> str:
    """Return the torch.distributed backend for `device`."""
    return "nccl" if has_gpu() else "gloo"


def nccl_version() -> tuple[int, ...] | None:
    """Return the version of torch's NCCL, or None without a GPU."""
    return torch.cuda.nccl.version()[:3] if has_gpu() else None


def activate() -> None:
    """Select this process's GPU, and deterministic kernels if `make_deterministic` was called."""
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
    """Wait until the device has completed all queued work."""
    if has_gpu():
        torch.cuda.synchronize()


def release_memory() -> None:
    """Return torch's cached GPU memory to the driver."""
    if has_gpu():
        torch.cuda.empty_cache()


def release_shared_memory() -> None:
    """Call `release_memory`, if other processes use the GPU, too (`SHARED_DEVICE`)."""
    if os.environ.get(SHARED_DEVICE) == "1":
        release_memory()


def free_memory_bytes() -> int:
    """Return the free bytes of the device, or on a CPU the available bytes of host memory."""
    return torch.cuda.mem_get_info()[0] if has_gpu() else available_bytes()


def total_memory_bytes() -> int:
    """Return the total bytes of the device, or on a CPU of the host memory."""
    return torch.cuda.mem_get_info()[1] if has_gpu() else total_bytes()


def description() -> str:
    """Return the name of the GPU, or the number of CPU threads."""
    return torch.cuda.get_device_name() if has_gpu() else f"CPU, {torch.get_num_threads()} threads"


@dataclass(frozen=True)
class DeviceInfo:
    """A worker's device, as shown in the start-up report."""

    description: str
    has_gpu: bool
    free_bytes: int


def device_info() -> DeviceInfo:
    """Return the description of this process's device."""
    return DeviceInfo(description(), has_gpu(), free_memory_bytes())


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a process in bytes. Without a GPU, torch's memory is the resident host memory."""

    process: str  # name of the process, different from names on other machines
    device: str  # name of the device, different from names on other machines
    has_gpu: bool
    allocated: int  # peak of tensors since `reset_peak_memory`. Without a GPU: as ``reserved``
    reserved: int  # peak of torch's or resident memory since `reset_peak_memory`
    current: int  # torch's or resident memory now
    free: int  # free memory of the device now
    total: int  # total memory of the device


def memory_use() -> MemoryUse:
    """Return this process's current and peak memory."""
    host = os.uname().nodename
    process = f"{host} {os.getpid()}"
    if not has_gpu():
        peak, now = peak_resident_bytes(), resident_bytes()
        return MemoryUse(process, host, False, peak, peak, now, available_bytes(), total_bytes())
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    now, memory = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    return MemoryUse(process, f"{host} {sharing_key()}", True, allocated, reserved, now, *memory)


def reset_peak_memory() -> None:
    """Reset the peaks of `memory_use`. Without a GPU, this has no effect on some systems."""
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak_resident()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports a failed allocation of memory, by its class or its text."""
    message = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in message for text in ("out of memory", "can't allocate memory", "memoryerror")
    )


def generator_state() -> Tensor | None:
    """Return the state of the GPU's random generator, uint8 [n], or None without a GPU."""
    return torch.cuda.get_rng_state() if has_gpu() else None


def set_generator_state(state: Tensor | None) -> None:
    """Restore the result of `generator_state`, uint8 [n]. Without a GPU, this has no effect."""
    if has_gpu() and state is not None:
        torch.cuda.set_rng_state(state)


def rng_state() -> dict[str, Any]:
    """Return the random states of device (``generator``) and megatron-core (``tracker``)."""
    return {"generator": generator_state(), "tracker": dict(_rng_tracker().get_states())}


def set_rng_state(state: Mapping[str, Any] | Tensor | None) -> None:
    """Restore the result of `rng_state`, or of `generator_state` (uint8 [n] or None)."""
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
    """Make `activate` select deterministic kernels, in this process and its child processes."""
    os.environ[_DETERMINISTIC] = "1"


def is_deterministic() -> bool:
    """Return whether the device computes deterministically. A CPU always does."""
    return not has_gpu() or torch.are_deterministic_algorithms_enabled()


def is_apart(tensor: Tensor) -> bool:
    """Return whether a tensor of any shape is in GPU memory, apart from host memory."""
    return tensor.is_cuda


def copy_memory(size: int) -> memoryview:
    """Allocate ``size`` bytes of host memory for copies, page-locked (faster) if there is a GPU."""
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
    """Copy a tensor [...] to the device ``where``, by default `device`, without waiting."""
    return tensor.to(where or device(), non_blocking=True)


class HostCopy:
    """Snapshot of tensors [...] in host memory, copied asynchronously."""

    def __init__(self, *tensors: Tensor) -> None:
        self._end: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._copies = [
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            self._end = torch.cuda.Event()
            self._end.record()
        else:
            self._copies = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[Tensor]:
        """Wait for the copies, not for later work of the device, and return them."""
        if self._end is not None:
            self._end.synchronize()
        return self._copies


def graph_memory() -> Any:
    """Create a memory pool that several CUDA graphs share, or None without a GPU."""
    return torch.cuda.graph_pool_handle() if has_gpu() else None


def capture(function: Callable[[], None], memory: Any) -> Callable[[], None]:
    """Capture the kernels of ``function`` as a CUDA graph. Return a function that launches it.

    No kernel runs during the capture. ``function`` must not read values of tensors on the host, and
    must write its results to existing tensors. ``memory``: result of `graph_memory`. Graphs with
    the same ``memory`` overwrite its contents, so they must not run at the same time.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # `torch.cuda.graph` would first wait for the device and return all cached memory to the driver.
    with torch.cuda.stream(stream):
        # "thread_local" lets other threads, as the watchdogs of NCCL, use CUDA during the capture.
        graph.capture_begin(memory, capture_error_mode="thread_local")
        try:
            function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def sharing_key() -> str:
    """Return an id of the GPU, else of the machine. Processes with equal ids can share memory."""
    if has_gpu():
        return f"GPU {torch.cuda.get_device_properties(device()).uuid}"
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"machine {file.read().strip()}"


def export_tensor(tensor: Tensor) -> Any:
    """Return a picklable CUDA IPC handle for a GPU tensor [...]. `import_tensor` opens it."""
    from torch.multiprocessing.reductions import reduce_tensor  # changes how tensors pickle

    return reduce_tensor(tensor)


def import_tensor(exported: Any) -> Tensor:
    """Open a GPU tensor of another process. ``exported``: result of `export_tensor` there."""
    # The GPU may have another index in the other process.
    rebuild, arguments = exported
    values = list(arguments)
    values[_IPC_DEVICE] = device().index
    return rebuild(*values)


def gpu_profiler(action: str) -> None:
    """Call ``cudaProfilerStart`` or ``cudaProfilerStop``, if there is a GPU."""
    if has_gpu():
        {"start": torch.cuda.profiler.start, "stop": torch.cuda.profiler.stop}[action]()


class _CudaLiterals(TorchFunctionMode):
    """Changes ``device="cuda"`` to the CPU, and the result of ``tensor.type()`` to a CUDA type."""

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
    """Context manager in which megatron-core may create tensors on "cuda" without a GPU."""
    return contextlib.nullcontext() if has_gpu() else _CudaLiterals()


@functools.cache
def prepare_megatron() -> None:
    """Prepare megatron-core for this machine, with or without a GPU. Later calls have no effect.

    Without a GPU, functions of torch.cuda that megatron-core always calls (current device,
    synchronisation, random states) are replaced by CPU functions.
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
    """Context manager: seed the generators of CPU and device, and finally restore their states."""
    cpu_state, device_state = torch.get_rng_state(), generator_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        set_generator_state(device_state)
