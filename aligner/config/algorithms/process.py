"""Processes of a run, their precision and time limit, and the user's callbacks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, StrictBool, StrictStr
from pydantic_core import PydanticCustomError

from aligner.config.fields import Count, UserClass


def _precision(value: Any) -> Any:
    """A number as YAML reads it, and Lightning's spellings."""
    if str(value) in ("16", "16-mixed", "16-true", "fp16"):
        raise PydanticCustomError(
            "float16",
            "{key}={value}: float16 needs a loss scale, which no role here keeps. Use bf16, or 32 "
            "where there is none",
            {"value": value},
        )
    known = {"32": "32", "32-true": "32", "bf16-mixed": "bf16", "bf16-true": "bf16"}
    return known.get(str(value), value)


# bf16 is megatron-core's: bfloat16 weights in the passes, float32 ones in the optimizer.
Precision = Annotated[Literal["32", "bf16"], BeforeValidator(_precision)]


def parse_duration(text: str) -> float:
    """Seconds of ``DD:HH:MM:SS``; ``ValueError`` where it is not that."""
    match = re.fullmatch(r"(\d{1,6}):(\d\d):([0-5]\d):([0-5]\d)", text)
    if match is None:
        raise ValueError(f"{text!r} is not DD:HH:MM:SS")
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _duration(text: str) -> str:
    try:
        parse_duration(text)
    except ValueError as error:
        raise PydanticCustomError(
            "duration",
            "{key}={text}: expected DD:HH:MM:SS, minutes and seconds below 60, for example "
            "00:04:00:00 for four hours",
            {"text": text},
        ) from error
    return text


Duration = Annotated[StrictStr, AfterValidator(_duration)]


@dataclass(frozen=True)
class ProcessConfig:
    """Processes, precision and limits."""

    num_nodes: Count = 1
    """Machines."""

    devices: Count = 1
    """Processes per machine.

    The script starts them itself, unless torchrun has; with `cluster.engine=ray`, Ray does.
    """

    precision: Precision = "32"
    """Format of the weights in forward and backward passes.

    `32` or `bf16` (Lightning's `32-true`, `bf16-true`, `bf16-mixed` are these). Value heads,
    losses, gradients and optimizer states are float32 in both.
    """

    deterministic: StrictBool = False
    """On GPUs too the same run twice is the same to the bit, resumed or not; slower.

    Operations are chosen whose sums are always made in one order (PyTorch's deterministic
    algorithms, flash attention's backward among them, one cuBLAS workspace, NCCL's ring). vLLM's
    samples are left out. CPUs repeat in any case.
    """

    max_time: Duration | None = None
    """`DD:HH:MM:SS`, after which the run saves and ends. `null` means no limit.

    After the step during which it passes, the run validates, saves and ends. The same command
    continues.
    """

    @property
    def max_seconds(self) -> float | None:
        """``max_time`` in seconds."""
        return None if self.max_time is None else parse_duration(self.max_time)

    @property
    def world_size(self) -> int:
        """Processes that the run asks for."""
        return self.num_nodes * self.devices


@dataclass(frozen=True)
class CallbackConfig:
    """A callback with arguments."""

    callback: UserClass
    """`package.module:Class` or `path/to/file.py:Class`."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""


@dataclass(frozen=True)
class TrainingConfig(ProcessConfig):
    """Processes of a run that trains, and its callbacks."""

    callbacks: tuple[UserClass | CallbackConfig, ...] = ()
    """Classes of your own that are called after steps, validations and saved states.

    `package.module:Class` or `path/to/file.py:Class`, or `{callback: CLASS, kwargs: {NAME: VALUE}}`
    (docs/howto.md#a-callback).
    """
