"""The machine of a benchmark of this folder: time, memory and kernels there.

``--device cuda``: times, memory and kernels of a GPU. ``--device dry``: the same calls at full size
on the dry device, which counts instead of timing. ``--device cpu``: times of this machine, for
rehearsals. `choose_device` comes before torch is imported. Everything else imports it when called.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES

DEVICES = ("cuda", "dry", "cpu")
PREDICTED = Path(__file__).parent / "dry" / "results.jsonl"  # results of `--device dry`


def choose_device(arguments: Sequence[str] | None = None) -> None:
    """Make ready for the command line's ``--device``. Call before torch is imported."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device")
    device = parser.parse_known_args(arguments)[0].device
    if device == "dry":
        from aligner_plan.dry.guard import load_guard

        load_guard()
    elif device == "cpu":
        os.environ["ALIGNER_FORCE_CPU"] = "1"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="see benchmarks/gpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-1.5b")
    parser.add_argument("--card", default="h200", help="of plan's table, whose times are predicted")
    parser.add_argument(
        "--repeats", type=int, default=5, help="number of readings, whose median counts"
    )
    parser.add_argument("--warmup", type=int, default=2, help="runs before them")
    return parser


class Machine:
    """Reads what functions cost on the chosen device."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device: str = options.device
        self.repeats, self.warmup = options.repeats, options.warmup
        self.card: str = options.card
        self._dry: Any = None

    @contextlib.contextmanager
    def running(self) -> Iterator["Machine"]:
        """Enter the block in which models are built and measured."""
        from aligner.device import accelerator

        if self.device == "dry":
            from aligner_plan.dry.device import DryDevice

            with DryDevice(memory_bytes=141 << 30) as self._dry:
                yield self
            return
        if accelerator.has_gpu() != (self.device == "cuda"):
            sys.exit(
                f"--device {self.device}, but this process would compute on "
                f"{accelerator.description()}; choose another of {', '.join(DEVICES)}"
            )
        yield self

    def measure(
        self, function: Callable[[], object], plan: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Measure one call of ``function``: counts on the dry device, else seconds.

        ``peak_bytes`` are those of tensors, what was alive before included. ``plan``: what
        `planned_amounts` gives. None: the dry device's counts at the rates that `plan` takes.
        """
        if self._dry is not None:
            function()  # what only the first call allocates, such as moments
            with self._dry.record() as record:
                function()
            return {
                "peak_bytes": record.peak_bytes,
                "peak_kinds": {str(kind): size for kind, size in record.peak.kinds.items()},
                "peak_at": record.peak_at,
                "launches": record.launches,
                "host_reads": record.host_reads,
                "flops": {str(k).removeprefix("torch."): n for k, n in record.flops.items()},
                "plan": plan or _at_rates(record, self.card),
            }
        import torch

        for _ in range(self.warmup):
            function()
        self.wait()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            function()
            self.wait()
            seconds.append(time.perf_counter() - start)
        result: dict[str, Any] = {"seconds": statistics.median(seconds), "fastest_s": min(seconds)}
        if self.device == "cuda":
            result["peak_bytes"] = torch.cuda.max_memory_allocated()
            result["reserved_bytes"] = torch.cuda.max_memory_reserved()
        return result

    def holds(self, model: Any) -> None:
        """Name the memory of a model's weights and gradients for the dry device."""
        if self._dry is not None:
            self._dry.name_memory(model)

    def kernels(self, function: Callable[[], object], most: int = 12) -> dict[str, Any]:
        """Profile one call: number of kernels, number of launches, the longest kernels by name.

        On the dry device only the launches, a CUDA graph being one. Empty on the CPU.
        """
        if self._dry is not None:
            with self._dry.record() as record:
                function()
            return {
                "launch_calls": record.launches,
                "host_reads": record.host_reads,
                "peak_bytes": record.peak_bytes,
            }
        if self.device == "cpu":
            function()
            return {}
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            function()
            self.wait()
        events = profiler.events() or []
        on_device = [event for event in events if event.device_type == DeviceType.CUDA]
        calls = [event.name for event in events if event.device_type == DeviceType.CPU]
        spent: dict[str, float] = {}
        for event in on_device:
            spent[event.name] = spent.get(event.name, 0.0) + event.self_device_time_total
        total = sum(spent.values()) or 1.0
        longest = sorted(spent.items(), key=lambda item: -item[1])[:most]
        return {
            "kernels": len(on_device),
            "launch_calls": sum("LaunchKernel" in name for name in calls),
            "graph_launches": sum("GraphLaunch" in name for name in calls),
            "kernel_seconds": total / 1e6,
            "longest": {name[:120]: round(time / total, 4) for name, time in longest},
        }

    def alive_bytes(self) -> int | None:
        """Return the bytes of tensors on the device, or None on the CPU."""
        if self._dry is not None:
            return int(self._dry.memory.alive_bytes)
        if self.device == "cpu":
            return None
        import torch

        return torch.cuda.memory_allocated()

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        from aligner.device import accelerator

        accelerator.synchronize()


def planned_amounts(options: argparse.Namespace, phase: str, **fields: Any) -> dict[str, Any]:
    """Return estimates of `plan` by part of a benchmark, only on the dry device.

    ``phase`` and ``fields``: a function of `benchmarks.gpu.planned` and what it takes. Call it
    outside of `Machine.running`.
    """
    if options.device != "dry":
        return {}
    from benchmarks.gpu import planned

    result: dict[str, Any] = getattr(planned, phase)(options.shape, options.card, **fields)
    return result


def _at_rates(record: Any, card: str) -> dict[str, Any]:
    """Convert counts of the dry device to seconds of `plan`."""
    from aligner_plan.amounts import Amounts, time_of
    from aligner_plan.devices import device_named

    time_ = time_of(Amounts.of(record), device_named(card))
    fields = {"seconds": time_.total, "bound": time_.bound, "peak_bytes": record.peak_bytes}
    return {"card": card, **fields}


def report(options: argparse.Namespace, benchmark: str, **result: Any) -> dict[str, Any]:
    """Print one line of JSON: the command, the machine, what was found, what was predicted.

    ``predicted`` is the line of the same command on the dry device, where there is one, and
    ``over_plan`` the result over the estimate of `plan` there.
    """
    import torch

    from aligner.device import accelerator

    run_options = {
        k: v for k, v in vars(options).items() if k not in ("device", "repeats", "warmup")
    }
    name = "dry" if options.device == "dry" else accelerator.description()
    line = {
        "benchmark": benchmark,
        **run_options,
        **{key: value for key, value in result.items() if key in run_options},
        "device": name,
        "torch": torch.__version__,
        "megatron_core": importlib.metadata.version("megatron-core"),
        **{key: value for key, value in result.items() if key not in run_options},
    }
    if options.device != "dry":
        line["predicted"] = predicted = _prediction(line)
        line["over_plan"] = dict(_over_plan(line, predicted or {}))
    print(json.dumps(line), flush=True)
    return line


def _prediction(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of the dry device for the same command, or None."""
    if not PREDICTED.exists():
        return None
    skipped = ("device", "torch", "megatron_core")
    for text in reversed(PREDICTED.read_text().splitlines()):  # the newest first
        planned_values = json.loads(text)
        equal_keys = [
            key for key, value in planned_values.items() if not isinstance(value, dict | float)
        ]
        settings = [key for key in equal_keys if key not in skipped and not key.endswith("_bytes")]
        if all(planned_values[key] == line.get(key, planned_values[key]) for key in settings):
            return {
                key: value
                for key, value in planned_values.items()
                if key not in (*settings, *skipped)
            }
    return None


def _over_plan(
    result: dict[str, Any], planned_values: dict[str, Any], at: str = ""
) -> Iterator[Any]:
    """Compute seconds and peak relative to `plan`, by part of the benchmark."""
    for name, part in planned_values.items():
        measured_value = result.get(name)
        if not isinstance(part, dict) or not isinstance(measured_value, dict):
            continue
        plan = part.get("plan", {})
        measured = {
            "seconds": measured_value.get(
                "seconds", measured_value.get("wait_s")
            ),  # what training waits for a save
            "peak_bytes": measured_value.get("peak_bytes"),
        }
        ratios = {
            key: value / plan[key] for key, value in measured.items() if value and plan.get(key)
        }
        if ratios:
            yield f"{at}{name}", ratios
        yield from _over_plan(measured_value, part, f"{at}{name}.")
