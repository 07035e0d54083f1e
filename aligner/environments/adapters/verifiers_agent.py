"""Tasks of verifiers, from 0.4 on: its own harness plays a task and asks the policy over HTTP."""

import copy
import functools
import itertools
import json
import os
import random
from collections.abc import Mapping
from typing import Any

from aligner.environments.adapters.foreign import imported
from aligner.errors import ConfigError, DataError

_PACKAGE = "'verifiers>=0.4'"
_KEY_VARIABLE = "OPENAI_API_KEY"


class VerifiersAgent:
    """An agent for ``environment.kind=endpoint``: one rollout of one task.

    A harness with verifiers' own server before the policy, runtimes, tools and rewards are those of
    verifiers; every message that is sampled comes from the base URL.
    """

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a missing package, another version or what makes no environment.

        Raises:
            ConfigError: with the key, what is wrong and its remedy.
        """
        _package()
        if "taskset" in kwargs:
            _made(kwargs["taskset"], kwargs.get("agent"))

    async def __call__(
        self,
        *,
        base_url: str,
        api_key: str,
        seed: int,
        taskset: str | Mapping[str, Any],
        agent: Mapping[str, Any] | None = None,
        idx: int | None = None,
        **columns: Any,
    ) -> dict[str, float] | None:
        """Run a task and score it.

        Args:
            base_url: the policy's address.
            api_key: the conversation's key.
            seed: chooses the task where ``idx`` is None.
            taskset: its module, or its settings with the module as ``id``.
            agent: settings of verifiers' ``AgentConfig``, such as ``harness`` and ``runtime``; the
                runtime is ``subprocess`` where none is set.
            idx: the task's position in the taskset.
            columns: all others of the row; not used.

        Returns:
            The trace's ``reward``, with its metrics and the scores of its rewards by their names.
            None if the task has no rewards.

        Raises:
            ConfigError: nothing can be made of ``taskset`` and ``agent``.
            DataError: there is no task ``idx``, or the rollout failed; with verifiers' errors.
        """
        del columns
        verifiers = _package()
        environment = _made(taskset, agent)
        os.environ[_KEY_VARIABLE] = api_key  # verifiers takes keys from variables alone
        policy = verifiers.ModelContext(
            model="policy",
            client=verifiers.EvalClientConfig(base_url=base_url, api_key_var=_KEY_VARIABLE),
        )
        async with environment.serving():
            episode = await environment.run_episode(_task(environment.taskset, idx, seed), policy)
        if not episode.ok:
            errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
            said = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise DataError(f"the rollout of verifiers failed: {said}")
        if len(episode.traces) != 1:
            raise DataError(
                f"the environment of verifiers ran its agent {len(episode.traces)} times; only one "
                "rollout can be scored, so take a taskset that runs it once"
            )
        (trace,) = episode.traces
        scores = {name: each.score for name, each in trace.rewards.items() if each is not None}
        if not scores:
            return None
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {**metrics, **scores, "reward": trace.reward}


run = VerifiersAgent()


def _package() -> Any:
    if hasattr(imported("verifiers", _PACKAGE), "MultiTurnEnv"):
        raise ConfigError(
            "this version of verifiers is older than 0.4; pip install --upgrade "
            f"{_PACKAGE}, or take aligner.environments.adapters.verifiers:VerifiersEnv"
        )
    return imported("verifiers.v1", _PACKAGE)


def _made(taskset: str | Mapping[str, Any], agent: Mapping[str, Any] | None) -> Any:
    chosen = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
    if not chosen.get("id"):
        raise ConfigError(
            f"environment.kwargs.taskset={taskset!r} names no taskset; give the name of a module, "
            "or settings with it as id"
        )
    settings = {"taskset": chosen, "agent": {"runtime": {"type": "subprocess"}, **(agent or {})}}
    return _environment(json.dumps(settings, sort_keys=True))


@functools.cache
def _environment(settings: str) -> Any:
    given = json.loads(settings)
    place = f"environment.kwargs.taskset={given['taskset']!r}"
    loaders = imported("verifiers.v1.utils.loaders", _PACKAGE)
    try:
        made = loaders.load_environment(loaders.resolve_env_config(copy.deepcopy(given)))
    except Exception as error:
        raise ConfigError(
            f"{place} with environment.kwargs.agent={given['agent']!r}: {error}. A taskset is a "
            "module of the current folder or on PYTHONPATH, whose __all__ has its Taskset; the "
            "other keys are those of verifiers' TasksetConfig and AgentConfig"
        ) from error
    roles = imported("verifiers.v1.configs.agent", _PACKAGE).agent_config_fields(made.config)
    if list(roles) != ["agent"]:
        raise ConfigError(
            f"{place} has the roles {', '.join(roles)}; one policy is trained, so take a taskset "
            "whose environment has the one role agent"
        )
    return made


@functools.cache
def _all_tasks(taskset: Any) -> list[Any]:
    return list(taskset)


def _task(taskset: Any, idx: int | None, seed: int) -> Any:
    """The task at ``idx``, or one that the seed chooses."""
    if taskset.bounded:
        tasks = _all_tasks(taskset)
        if idx is None and tasks:
            idx = random.Random(seed).randrange(len(tasks))
        if idx is None or not 0 <= idx < len(tasks):
            raise DataError(
                f"idx={idx} is no task: the taskset has {len(tasks)}, counted from 0; give the "
                "data a column idx of such numbers, or none"
            )
        return tasks[idx]
    if idx is None:
        raise DataError(
            "the taskset never ends, so the seed cannot choose of it; give the data a column idx "
            "with the positions of tasks"
        )
    return next(itertools.islice(iter(taskset), idx, None))
