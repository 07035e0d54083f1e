"""Functions as tools: the environment of ``environment.tools``."""

from collections.abc import Mapping, Sequence
from typing import Any

from aligner.data.chat import Message
from aligner.environments.adapters.foreign import ScoredTools, scorer_of
from aligner.environments.calls import Form
from aligner.environments.tools import json_schema
from aligner.errors import ConfigError
from aligner.importing import load_function


class FunctionTools(ScoredTools):
    """Environment that asks the row's prompt and offers functions as tools."""

    def __init__(
        self,
        *,
        seed: int,
        prompt: str | Sequence[Message],
        tools: Sequence[str],
        reward: str | None = None,
        reward_kwargs: Mapping[str, Any] | None = None,
        ground_truth: Any = None,
        form: Form = "hermes",
        **columns: Any,
    ) -> None:
        """Load the functions ``tools`` and the reward function, as `MCPEnv` does."""
        del seed
        functions = [load_function(tool, key="environment.tools") for tool in tools]
        scorer = scorer_of(reward, reward_kwargs)
        super().__init__(prompt, functions, form, scorer, ground_truth, columns)

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` before the run if a tool or the reward function is unusable."""
        names: set[str] = set()
        for tool in kwargs["tools"]:
            name = json_schema(load_function(tool, key="environment.tools"))["function"]["name"]
            if name in names:
                raise ConfigError(
                    f"environment.tools: two functions are named {name!r}. Rename one"
                )
            names.add(name)
        cls.check_reward(kwargs)
