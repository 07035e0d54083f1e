"""Conversations with a calculator, written by a rule: examples for a warm start before PPO.

They are made by the environment itself (`aligner.environments.tools.Calculation`), so that what is
learned from is what the policy will read.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

from aligner.environments.tools import Calculation, Form
from aligner.errors import ConfigError
from aligner.examples.tasks.arithmetic import arithmetic_prompts


def calculation_traces(
    *, form: Form = "plain", tool_share: float = 0.3, **arguments: Any
) -> Iterator[dict[str, Any]]:
    """Yield rows with the column messages, a whole chat, and tools where the template shows them.

    Args:
        form: of calls; see `aligner.environments.tools`.
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
