"""Reward functions in the forms of TRL, verl and OpenRLHF, as functions of our protocol.

The names of the parameters determine the form:

* TRL: ``completions``, with ``prompts`` and columns by keyword. If a prompt is a list of messages,
  prompts and completions are such lists, too (TRL 1.16, ``reward_funcs`` of ``GRPOTrainer``).
* verl: ``solution_str`` and ``ground_truth`` of one sample, usually with ``data_source`` and
  ``extra_info``. A dict has the reward in ``score`` (verl 0.6, ``custom_reward_function``).
* OpenRLHF: ``queries`` (prompt and response), ``prompts`` and ``labels`` (the ground truths). A
  dict has lists in ``rewards`` and ``extra_logs`` (OpenRLHF 0.8, ``reward_func``).

Every reward process loads this module, so it imports neither torch nor numpy.
"""

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, NamedTuple

from aligner.data.chat import MESSAGES
from aligner.errors import RewardError

Function = Callable[..., Any]


class Form(NamedTuple):
    """A form. ``arguments``: parameters that are no columns. ``adapted``: see `of_form`."""

    name: str
    required: Set[str]
    arguments: Set[str]
    adapted: Callable[[Function, Collection[str]], Function]


def of_form(function: Function, bound: Function) -> tuple[Form | None, Function]:
    """Return the form of ``function`` and a function of our protocol, or None and ``bound``.

    ``bound``: the function with ``reward.kwargs``. Its other parameters are those of the result.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C
        return None, bound
    is_ours = {"responses", "ground_truths"} & parameters.keys()
    form = next((form for form in FORMS if form.required <= parameters.keys()), None)
    if form is None or is_ours:
        return None, bound
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    adapted = form.adapted(
        bound, form.arguments if takes_all else form.arguments & parameters.keys()
    )
    lists = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in "prt"]
    columns = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in parameters.items()
        if name not in form.arguments and parameter.kind is not parameter.VAR_KEYWORD
    ]
    columns.append(inspect.Parameter(MESSAGES, inspect.Parameter.KEYWORD_ONLY, default=None))
    rest = [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)] if takes_all else []
    adapted.__signature__ = inspect.Signature([*lists, *columns, *rest])  # type: ignore[attr-defined]
    return form, adapted


def _trl(function: Function, arguments: Collection[str]) -> Function:
    def reward(
        prompts: list[str], responses: list[str], ground_truths: list[Any], **columns: Any
    ) -> Any:
        chats = columns.pop(MESSAGES, None) or [None] * len(prompts)
        answers = [[{"role": "assistant", "content": response}] for response in responses]
        values = {
            "prompts": [
                p if chat is None else chat for p, chat in zip(prompts, chats, strict=True)
            ],
            "completions": [
                response if chat is None else answer
                for response, answer, chat in zip(responses, answers, chats, strict=True)
            ],
            "ground_truth": ground_truths,
        }
        return function(**{**columns, **{name: values[name] for name in arguments}})

    return reward


def _verl(function: Function, _: Collection[str]) -> Function:
    def scores(results: list[Any]) -> list[Any]:
        if any(isinstance(result, list | tuple) for result in results):
            raise RewardError(
                "the function has verl's arguments of one sample, but returned a list. Return one"
                " score, or name the arguments prompts, responses and ground_truths"
            )
        return [
            {"reward": result["score"], **{k: v for k, v in result.items() if k != "score"}}
            if isinstance(result, Mapping) and "score" in result
            else result
            for result in results
        ]

    def reward(
        prompts: list[str], responses: list[str], ground_truths: list[Any], **columns: Any
    ) -> Any:
        columns |= {"solution_str": responses, "ground_truth": ground_truths}
        columns.pop(MESSAGES, None)
        results = [
            function(**{name: values[index] for name, values in columns.items()})
            for index in range(len(prompts))
        ]
        if not any(map(inspect.isawaitable, results)):
            return scores(results)

        async def gathered() -> list[Any]:
            return scores(await asyncio.gather(*results))

        return gathered()

    return reward


def _openrlhf(function: Function, arguments: Collection[str]) -> Function:
    def reward(
        prompts: list[str], responses: list[str], ground_truths: list[Any], **columns: Any
    ) -> Any:
        columns.pop(MESSAGES, None)
        queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        values = {"queries": queries, "prompts": prompts, "labels": ground_truths}
        result = function(**{**columns, **{name: values[name] for name in arguments}})
        if not isinstance(result, Mapping) or "rewards" not in result:
            return result
        table = {"reward": result["rewards"], **(result.get("extra_logs") or {})}
        lists = [
            values.tolist() if hasattr(values, "tolist") else values for values in table.values()
        ]
        return [dict(zip(table, row, strict=True)) for row in zip(*lists, strict=True)]

    return reward


FORMS = (
    Form("TRL", {"completions"}, {"prompts", "completions", "ground_truth"}, _trl),
    Form("verl", {"solution_str", "ground_truth"}, {"solution_str", "ground_truth"}, _verl),
    Form("OpenRLHF", {"queries", "prompts"}, {"queries", "prompts", "labels"}, _openrlhf),
)
