"""Tasks of verifiers from 0.4 on, whose own harness runs a task and calls the policy over HTTP."""

import copy
import functools
import itertools
import json
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

from aligner.errors import ConfigError, DataError, raised_as
from aligner_environments.foreign import imported

_PACKAGE = "'verifiers>=0.4'"
_KEY_VARIABLE = "OPENAI_API_KEY"


class VerifiersAgent:
    """An agent for ``environment.kind=endpoint``: one rollout of one task.

    verifiers provides the harness with its proxy server, runtimes, tools and rewards. All messages
    are sampled from the base URL.
    """

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a missing package, another version or an invalid taskset."""
        _package()
        if "taskset" in kwargs:
            _load(kwargs["taskset"], kwargs.get("agent"))

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
        """Run a task and score it. docs/environments_adapters.md describes the arguments.

        Returns:
            A mapping with the ``reward`` of the trace, its metrics and the score of each reward.
            None if the task has no rewards.

        Raises:
            ConfigError: ``taskset`` or ``agent`` is invalid.
            DataError: task ``idx`` does not exist, or the rollout failed with verifiers' errors.
        """
        del columns
        verifiers = _package()
        environment = _load(taskset, agent)
        os.environ[_KEY_VARIABLE] = api_key  # verifiers reads keys only from variables
        policy = verifiers.ModelContext(
            model="policy",
            client=verifiers.EvalClientConfig(base_url=base_url, api_key_var=_KEY_VARIABLE),
        )
        # Run one rollout of the task.
        async with environment.serving():
            episode = await environment.run_episode(_task(environment.taskset, idx, seed), policy)
        if not episode.ok:
            errors = [
                *episode.errors,
                *(error for trace in episode.traces for error in trace.errors),
            ]
            texts = (f"{error.type}: {error.message}" for error in errors)
            raise DataError(f"the rollout of verifiers failed: {'; '.join(texts)}")
        if len(episode.traces) != 1:
            raise DataError(
                f"the verifiers environment ran its agent {len(episode.traces)} times, but only "
                "one rollout can be scored. Use an environment that runs its agent once"
            )
        # The rewards and the metrics of the rollout.
        (trace,) = episode.traces
        scores = {
            name: reward.score for name, reward in trace.rewards.items() if reward is not None
        }
        if not scores:
            return None
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {**metrics, **scores, "reward": trace.reward}


run = VerifiersAgent()


def _package() -> Any:
    if hasattr(imported("verifiers", _PACKAGE), "MultiTurnEnv"):
        raise ConfigError(
            "this version of verifiers is older than 0.4. Run pip install --upgrade "
            f"{_PACKAGE}, or use aligner_environments.verifiers:VerifiersEnv"
        )
    return imported("verifiers.v1", _PACKAGE)


def _load(taskset: str | Mapping[str, Any], agent: Mapping[str, Any] | None) -> Any:
    taskset_settings = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
    if not taskset_settings.get("id"):
        raise ConfigError(
            f"environment.kwargs.taskset={taskset!r} names no taskset. Set the name of a module, "
            "or settings with the module as id"
        )
    agent_settings = {"runtime": {"type": "subprocess"}, **(agent or {})}
    settings = {"taskset": taskset_settings, "agent": agent_settings}
    return _environment(json.dumps(settings, sort_keys=True))


@functools.cache
def _environment(settings: str) -> Any:
    config = json.loads(settings)
    key = f"environment.kwargs.taskset={config['taskset']!r}"
    loaders = imported("verifiers.v1.utils.loaders", _PACKAGE)
    remedy = (
        "a taskset is a module in the current folder or on PYTHONPATH, whose __all__ contains its "
        "Taskset. The other keys are those of verifiers' TasksetConfig and AgentConfig"
    )
    with raised_as(
        ConfigError, f"{key} with environment.kwargs.agent={config['agent']!r}", remedy=remedy
    ):
        environment = loaders.load_environment(loaders.resolve_env_config(copy.deepcopy(config)))
    # Only the policy is trained, so there must be one agent.
    roles = imported("verifiers.v1.configs.agent", _PACKAGE).agent_config_fields(environment.config)
    if list(roles) != ["agent"]:
        raise ConfigError(
            f"{key} has the roles {', '.join(roles)}, but one policy is trained. Use a taskset "
            "whose environment has only the role agent"
        )
    return environment


_all_tasks: Callable[[Any], list[Any]] = functools.cache(list)


def _task(taskset: Any, idx: int | None, seed: int) -> Any:
    """Return the task at ``idx``, or a task that the seed chooses."""
    # A list of tasks, from which the seed can choose, or an endless stream.
    if taskset.bounded:
        tasks = _all_tasks(taskset)
        if idx is None and tasks:
            idx = random.Random(seed).randrange(len(tasks))
        if idx is None or not 0 <= idx < len(tasks):
            raise DataError(
                f"idx={idx} does not exist: the taskset has {len(tasks)} tasks, counted from 0. "
                "Give the data a column idx with such indices, or no such column"
            )
        return tasks[idx]
    if idx is None:
        raise DataError(
            "the taskset never ends, so the seed cannot choose a task. Give the data a column idx "
            "with the indices of tasks"
        )
    return next(itertools.islice(iter(taskset), idx, None))
