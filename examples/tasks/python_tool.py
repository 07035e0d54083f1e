"""A Python interpreter as a tool. Each program of the policy runs in a separate sandboxed process.

`aligner.examples.tasks.sandbox` describes the isolation.
"""

from collections.abc import Callable, Sequence
from typing import Any, get_args

from aligner.environments.calls import Form
from aligner.errors import ConfigError
from aligner.examples.tasks.calculator import Calculation
from aligner.examples.tasks.sandbox import Isolation, check_isolation, run_program

_MOST_CODE = 20_000  # characters
_LEAST_MEMORY_MB = 64  # Python itself needs about half of it


class Interpreter:
    """Interpreter of independent Python programs.

    Args:
        timeout_s: time limit of a program, in seconds, including its start.
        memory_mb: address space of a program, in MiB.
        isolation: see `aligner.examples.tasks.sandbox.run_program`.

    Raises:
        ConfigError: a value is invalid, or the kernel does not support ``isolation=kernel``.
    """

    def __init__(
        self, *, timeout_s: float = 5.0, memory_mb: int = 256, isolation: Isolation = "kernel"
    ) -> None:
        if isolation not in get_args(Isolation):
            raise ConfigError(
                f"interpreter: isolation={isolation!r} must be one of "
                f"{', '.join(get_args(Isolation))}"
            )
        if not timeout_s > 0 or memory_mb < _LEAST_MEMORY_MB:
            raise ConfigError(
                f"interpreter: timeout_s={timeout_s} must be above 0, and memory_mb={memory_mb} at "
                f"least {_LEAST_MEMORY_MB}"
            )
        self._timeout_s, self._memory_mb, self._isolation = timeout_s, memory_mb, isolation
        check_isolation(isolation)

    def python(self, code: str) -> str:
        """Run a Python program; returns what it prints, and the value of its last line.

        Args:
            code: The program. It has the standard library, no network and no earlier variables.
        """
        if len(code) > _MOST_CODE:
            raise ValueError(f"the program is longer than {_MOST_CODE} characters")
        output, problem = run_program(code, self._timeout_s, self._memory_mb, self._isolation)
        text = output.decode(errors="replace").rstrip("\n")
        lines = [text, *([] if problem is None else [f"error: {problem}"])]
        return "\n".join(line for line in lines if line) or "(no output)"


class Programming(Calculation):
    """Problems with a number as answer, and a Python interpreter as a tool.

    ``timeout_s``, ``memory_mb`` and ``isolation`` are arguments of `Interpreter`. Columns, reward
    and the other arguments are those of `Calculation`.
    """

    def __init__(
        self,
        *,
        seed: int,
        prompt: str,
        ground_truth: str,
        form: Form = "hermes",
        call_reward: float | None = None,
        timeout_s: float = 5.0,
        memory_mb: int = 256,
        isolation: Isolation = "kernel",
        **columns: Any,
    ) -> None:
        """Create the environment of a row with an interpreter."""
        self._interpreter = Interpreter(
            timeout_s=timeout_s, memory_mb=memory_mb, isolation=isolation
        )
        super().__init__(
            seed=seed,
            prompt=prompt,
            ground_truth=ground_truth,
            form=form,
            call_reward=call_reward,
            **columns,
        )

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the interpreter as the only tool."""
        return [self._interpreter.python]
