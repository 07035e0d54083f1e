"""A Python interpreter as a tool: programs of the policy, each in a process without rights.

Every call starts a process of its own (`aligner.environments.sandbox`).
"""

from collections.abc import Callable, Sequence
from typing import Any, get_args

from aligner.environments.calls import Form
from aligner.environments.sandbox import Isolation, check_isolation, run_program
from aligner.errors import ConfigError
from aligner.examples.tasks.calculator import Calculation

_MOST_CODE = 20_000  # characters
_LEAST_MEMORY_MB = 64  # Python itself needs about half of it


class Interpreter:
    """Runs Python programs, each by itself.

    Args:
        timeout_s: longest time of a program, in seconds, its start included.
        memory_mb: address space of a program, in MiB.
        isolation: see `aligner.environments.sandbox.run_program`.

    Raises:
        ConfigError: a value that cannot work, or a kernel without what ``isolation=kernel`` needs.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        memory_mb: int = 256,
        isolation: Isolation = "kernel",
    ) -> None:
        if isolation not in get_args(Isolation):
            raise ConfigError(
                f"interpreter: isolation={isolation!r} is not one of "
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
    """Problems with a number as answer, and a Python interpreter.

    Columns, reward and the further arguments are those of `Calculation`; ``timeout_s``,
    ``memory_mb`` and ``isolation`` those of `Interpreter`.
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
        """Offer the interpreter."""
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
        """The interpreter."""
        return [self._interpreter.python]
