"""Adapts reward functions that were written for TRL, verl or OpenRLHF to our protocol.

A function's parameter names determine its form:

* TRL: ``completions``, ``prompts`` and columns, by keyword. For chat prompts, prompts and
  completions are lists of messages (TRL 1.16, ``reward_funcs`` of ``GRPOTrainer``).
* verl: ``solution_str`` and ``ground_truth`` of one sample, usually with ``data_source`` and
  ``extra_info``. A returned dict has the key ``score`` (verl 0.6, ``custom_reward_function``).
* OpenRLHF: ``queries`` (prompt + response), ``prompts`` and ``labels`` (the ground truths). A
  returned dict has lists in ``rewards`` and ``extra_logs`` (OpenRLHF 0.8, ``reward_func``).

Every reward process loads this module, so it imports neither torch nor numpy.
"""

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from aligner.data.chat import MESSAGES
from aligner.errors import RewardError

Function = Callable[..., Any]
Lists = tuple[list[str], list[str], list[Any]]  # prompts, responses and ground truths


class Form(NamedTuple):
    """How another library calls reward functions.

    ``required``: parameters that identify the form. ``arguments``: all parameters of the form that
    are not data columns. ``call(function, arguments, lists, columns)`` calls ``function`` with
    ``arguments``, taken from ``lists``, and with ``columns``. It returns scores as
    `aligner.rewards.protocol` describes.
    """

    name: str
    required: frozenset[str]
    arguments: frozenset[str]
    call: Callable[[Function, Collection[str], Lists, dict[str, Any]], Any]


def of_form(function: Function, bound: Function) -> tuple[Form | None, Function]:
    """Return the form of ``function``, and a function that follows `aligner.rewards.protocol`.

    ``bound`` is ``function`` with ``reward.kwargs`` bound. If no form matches, the result is None
    and ``bound``. The second result accepts the data columns of ``function`` as keywords.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C
        return None, bound
    follows_protocol = {"responses", "ground_truths"} & parameters.keys()
    form = next((form for form in FORMS if form.required <= parameters.keys()), None)
    if form is None or follows_protocol:
        return None, bound
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = form.arguments if takes_all else form.arguments & parameters.keys()

    def adapted(*lists: Any, **columns: Any) -> Any:
        return form.call(bound, arguments, lists, columns)

    # Give the function a signature, from which `Signature.of` finds its columns. The lists are
    # positional only, so a column can have any name: p, r and t are never used.
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


def _trl(function: Function, arguments: Collection[str], lists: Lists, columns: Any) -> Any:
    prompts, responses, truths = lists
    chats = columns.pop(MESSAGES, None) or [None] * len(prompts)
    # Samples with messages get lists of messages instead of texts.
    rows = zip(prompts, responses, chats, strict=True)
    pairs = [
        (prompt, text) if chat is None else (chat, [{"role": "assistant", "content": text}])
        for prompt, text, chat in rows
    ]
    values = {
        "prompts": [prompt for prompt, _ in pairs],
        "completions": [completion for _, completion in pairs],
        "ground_truth": truths,
    }
    return function(**{**columns, **{name: values[name] for name in arguments}})


def _verl(function: Function, arguments: Collection[str], lists: Lists, columns: Any) -> Any:
    columns.pop(MESSAGES, None)
    results = []
    for index, (response, truth) in enumerate(zip(*lists[1:], strict=True)):
        sample = {name: values[index] for name, values in columns.items()}
        results.append(function(**{**sample, "solution_str": response, "ground_truth": truth}))
    if not any(map(inspect.isawaitable, results)):
        return _verl_scores(results)

    async def gathered() -> list[Any]:
        return _verl_scores(await asyncio.gather(*results))

    return gathered()


def _verl_scores(results: list[Any]) -> list[Any]:
    if any(isinstance(result, list | tuple) for result in results):
        raise RewardError(
            "a function with verl's arguments solution_str and ground_truth scores one sample, but "
            "it returned a list. Return one number, or rename the arguments to prompts, responses "
            "and ground_truths"
        )
    return [
        {"reward": result["score"], **{k: v for k, v in result.items() if k != "score"}}
        if isinstance(result, Mapping) and "score" in result
        else result
        for result in results
    ]


def _openrlhf(function: Function, arguments: Collection[str], lists: Lists, columns: Any) -> Any:
    prompts, responses, truths = lists
    columns.pop(MESSAGES, None)
    queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    values = {"queries": queries, "prompts": prompts, "labels": truths}
    result = function(**{**columns, **{name: values[name] for name in arguments}})
    if not isinstance(result, Mapping) or "rewards" not in result:
        return result
    table = {"reward": result["rewards"], **(result.get("extra_logs") or {})}
    scores = [column.tolist() if hasattr(column, "tolist") else column for column in table.values()]
    return [dict(zip(table, row, strict=True)) for row in zip(*scores, strict=True)]


_TRL_ARGUMENTS = frozenset({"prompts", "completions", "ground_truth"})
_VERL_ARGUMENTS = frozenset({"solution_str", "ground_truth"})
_OPENRLHF_ARGUMENTS = frozenset({"queries", "prompts", "labels"})
FORMS = (
    Form("TRL", frozenset({"completions"}), _TRL_ARGUMENTS, _trl),
    Form("verl", _VERL_ARGUMENTS, _VERL_ARGUMENTS, _verl),
    Form("OpenRLHF", frozenset({"queries", "prompts"}), _OPENRLHF_ARGUMENTS, _openrlhf),
)
