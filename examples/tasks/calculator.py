"""A calculator as a tool: an environment, and conversations as examples for fine-tuning.

`calculation_traces` follow a rule and provide a warm start before PPO. The environment
(`Calculation`) generates them, so that the policy later reads messages of the same form.
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
    """Arithmetic with a calculator: reward 1 if the last number of the answer is right, else 0.

    Reads the columns ``prompt`` (the question) and ``ground_truth`` (the number), such as those of
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
        """Create the environment of a row.

        ``call_reward``: reward of a message whose calls returned numbers. None leaves such messages
        unscored.
        """
        del seed, columns
        super().__init__(self.tools(), form)
        self._prompt, self._truth, self._call_reward = prompt, ground_truth, call_reward

    def tools(self) -> Sequence[Callable[..., Any]]:
        """Return the functions that the policy may call."""
        return [calculator]

    def question(self) -> str:
        """Return the question of the row."""
        return self._prompt

    def answered(self, text: str) -> Turn:
        """Compare the last number of the answer with the ground truth."""
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        right = bool(numbers) and float(numbers[-1]) == float(self._truth)
        return Turn(reward={"reward": float(right), "accuracy": float(right)}, done=True)

    def call_reward(self, calls: Sequence[ToolCall], results: Sequence[str]) -> float | None:
        """Return the configured reward if every call returned a number."""
        del calls
        if self._call_reward is None or any(result.startswith("error") for result in results):
            return None
        return self._call_reward


def calculation_traces(
    *, form: Form = "plain", tool_share: float = 0.3, **arguments: Any
) -> Iterator[dict[str, Any]]:
    """Yield rows with the column messages, a complete chat, and tools if the template shows them.

    Args:
        form: form of calls (`aligner.environments.calls`).
        tool_share: probability that the answer is computed with the calculator. Otherwise the right
            answer follows directly, which a small model cannot learn for large numbers. A model
            trained on the rows calls the tool about as often, and PPO learns when a call is useful.
        arguments: arguments of `aligner.examples.tasks.arithmetic.arithmetic_prompts`.

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
    """Compute an arithmetic expression, and refuse all other expressions of Python."""
    # The whitelist bounds the size of values, so that no expression takes long.
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
