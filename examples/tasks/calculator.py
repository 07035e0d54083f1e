"""A calculator as a tool: the environment, and conversations with it as examples.

`calculation_traces` are written by a rule, for a warm start before PPO. They are made by the
environment itself (`Calculation`), so that what is learned from is what the policy will read.
"""

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from aligner.environments.calls import Form, ToolCall
from aligner.environments.protocol import Turn
from aligner.environments.tools import ToolEnv
from aligner.errors import ConfigError
from aligner.examples.tasks.arithmetic import arithmetic_prompts


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses.
    """
    if len(expression) > 200:
        raise ValueError("the expression is longer than 200 characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return f"{value:.10g}" if isinstance(value, float) else str(value)


class Calculation(ToolEnv):
    """Arithmetic with a calculator: 1 for the right number at the end of the answer, 0 else.

    Reads the columns ``prompt``, the question, and ``ground_truth``, the number, as those of
    `aligner.examples.tasks.arithmetic`.
    """

    def __init__(
        self,
        *,
        seed: int,
        prompt: str,
        ground_truth: str,
        form: Form = "hermes",
        call_reward: float | None = None,
        **columns: Any,
    ) -> None:
        """``call_reward``: of a message with a call that gave a number.

        None means it is not scored.
        """
        del seed, columns
        super().__init__(self.tools(), form)
        self._prompt, self._truth, self._call_reward = prompt, ground_truth, call_reward

    def tools(self) -> Sequence[Callable[..., Any]]:
        """The functions that are offered."""
        return [calculator]

    def question(self) -> str:
        """The row's question."""
        return self._prompt

    def answered(self, text: str) -> Turn:
        """Compare the last number of the answer."""
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        right = bool(numbers) and float(numbers[-1]) == float(self._truth)
        return Turn(reward={"reward": float(right), "accuracy": float(right)}, done=True)

    def call_reward(self, calls: Sequence[ToolCall], results: Sequence[str]) -> float | None:
        """The configured reward where every call gave a number."""
        del calls
        if self._call_reward is None or any(each.startswith("error") for each in results):
            return None
        return self._call_reward


def calculation_traces(
    *, form: Form = "plain", tool_share: float = 0.3, **arguments: Any
) -> Iterator[dict[str, Any]]:
    """Yield rows with the column messages, a whole chat, and tools where the template shows them.

    Args:
        form: of calls. See `aligner.environments.calls`.
        tool_share: probability that the answer is computed with the calculator; else it is given at
            once, right as well, which a small model cannot learn to do for large numbers. So a
            model that learned from these calls about as often, and PPO finds out what pays.
        arguments: of `aligner.examples.tasks.arithmetic.arithmetic_prompts`.

    Row ``i`` depends only on (seed, split, i).
    """
    if not 0 <= tool_share <= 1:
        raise ConfigError(f"calculation traces: tool_share={tool_share} must lie between 0 and 1")
    key = f"{arguments.get('seed', 0)}/{arguments.get('split', 'train')}/trace"
    for index, row in enumerate(arithmetic_prompts(**arguments)):
        environment = Calculation(seed=0, form=form, **row)
        start = environment.init()
        messages = list(start.messages)
        if random.Random(f"{key}/{index}").random() < tool_share:
            call = _answer(_call(f"{row['a']}{row['operator']}{row['b']}", form))
            messages += [call, *environment.step(call).messages]
        messages.append(_answer(row["ground_truth"]))
        tools = {} if start.tools is None else {"tools": list(start.tools)}
        yield {"messages": messages, **tools}


def _call(expression: str, form: Form) -> str:
    arguments = {"expression": expression}
    if form == "plain":
        return f"call calculator {json.dumps(arguments)}"
    call = json.dumps({"name": "calculator", "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def _answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST = 10**50


def _value(node: ast.expr) -> int | float:
    """Value of an arithmetic expression; whatever else Python has is refused."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _value(left), _value(right)
            if abs(power) > 100 or abs(base) > 10**6:
                raise ValueError("the power is too large")
            value = base**power
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            value = _BINARY[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses")
    if isinstance(value, complex) or abs(value) > _LARGEST:
        raise ValueError("the value is too large, or no real number")
    return value
