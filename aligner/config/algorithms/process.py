"""Processes of a run, precision, time limit and callbacks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, StrictBool, StrictStr
from pydantic_core import PydanticCustomError

from aligner.config.fields import Count, UserClass


def _precision(value: Any) -> Any:
    """Convert Lightning's names, such as "bf16-mixed", to "bf16" or "32". Refuse float16."""
    if str(value) in ("16", "16-mixed", "16-true", "fp16"):
        raise PydanticCustomError(
            "float16",
            "{key}={value}: float16 needs loss scaling, which is not available. Use bf16, or 32 "
            "on devices without bf16",
            {"value": value},
        )
    spellings = {"32": "32", "32-true": "32", "bf16-mixed": "bf16", "bf16-true": "bf16"}
    return spellings.get(str(value), value)


# megatron-core's bf16: bfloat16 weights in forward and backward, float32 weights in the optimizer.
Precision = Annotated[Literal["32", "bf16"], BeforeValidator(_precision)]


def _duration(text: str) -> str:
    if not re.fullmatch(r"\d{1,6}:\d\d:[0-5]\d:[0-5]\d", text):
        raise PydanticCustomError(
            "duration",
            "{key}={text}: expected DD:HH:MM:SS with minutes and seconds below 60. For example, "
            "four hours are 00:04:00:00",
            {"text": text},
        )
    return text


Duration = Annotated[StrictStr, AfterValidator(_duration)]


@dataclass(frozen=True)
class ProcessConfig:
    """Number of processes, number format and time limit of a command."""

    num_nodes: Count = 1
    """Number of machines."""

    devices: Count = 1
    """Number of processes per machine. The script starts them, unless torchrun or Ray does."""

    precision: Precision = "32"
    """Format of the weights in forward and backward passes: `32`, `bf16`, or one of Lightning's
    `32-true`, `bf16-true` and `bf16-mixed`. Value heads, losses, gradients and optimizer states are
    always float32."""

    deterministic: StrictBool = False
    """Make runs on GPUs repeatable to the bit. Slower. vLLM's samples may still differ. Runs on
    CPUs are always repeatable."""

    max_time: Duration | None = None
    """Time limit of the run as `DD:HH:MM:SS`. `null` means no limit. The run then finishes the
    current step, validates, saves and ends."""

    @property
    def max_seconds(self) -> float | None:
        """``max_time`` in seconds, or None without a limit."""
        if self.max_time is None:
            return None
        days, hours, minutes, seconds = map(int, self.max_time.split(":"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

    @property
    def world_size(self) -> int:
        """Number of processes of the run."""
        return self.num_nodes * self.devices


@dataclass(frozen=True)
class CallbackConfig:
    """A callback class, and keyword arguments of its constructor."""

    callback: UserClass
    """`package.module:Class` or `path/to/file.py:Class`."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor."""


@dataclass(frozen=True)
class TrainingConfig(ProcessConfig):
    """Processes and callbacks of a training run."""

    callbacks: tuple[UserClass | CallbackConfig, ...] = ()
    """User-defined classes that are called after steps, validations and saved states. Each is
    `package.module:Class`, `path/to/file.py:Class`, or `{callback: CLASS, kwargs: {NAME: VALUE}}`
    (docs/howto.md#a-callback)."""
