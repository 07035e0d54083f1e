"""Functions as tools (``environment.tools``), and base classes of environments with tools."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aligner.data.chat import MESSAGES, Message
from aligner.environments.calls import Form
from aligner.environments.protocol import Start, Turn
from aligner.environments.tools import ToolEnv, json_schema
from aligner.errors import ConfigError, DataError
from aligner.importing import load_function
from aligner.rewards.function.execution import LoadedFunction
from aligner.rewards.protocol import Samples


def loaded(name: str, key: str) -> Any:
    """Load the class or function with the path ``name``, set by ``environment.kwargs.KEY``."""
    return load_function(name, key=f"environment.kwargs.{key}")


def prompt_messages(prompt: str | Sequence[Message] | None) -> list[Message]:
    """Return a row's prompt as messages. Text becomes a user message, None an empty list."""
    if not prompt:
        return []
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


class PromptedTools(ToolEnv):
    """Base class of environments with tools in which conversations begin with a row's prompt."""

    explains_calls = True

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[Callable[..., Any]], form: Form
    ) -> None:
        """Begin with ``messages``, and offer ``tools``. The last message must be a user message."""
        super().__init__(tools, form)
        if not messages or messages[-1]["role"] != "user":
            raise DataError(
                "the prompt does not end with a user message. Add a column 'prompt' to the data, "
                "with text, or with messages of which the last has the role user"
            )
        self.messages = list(messages)

    def question(self) -> str:
        """Return the text of the user's last message."""
        return str(self.messages[-1]["content"])

    def init(self) -> Start:
        """Return the prompt with the tools."""
        start = super().init()
        return Start([*self.messages[:-1], *start.messages], start.tools)


class ScoredTools(PromptedTools):
    """Base class of environments with tools in which a reward function scores the answer."""

    def __init__(
        self,
        prompt: str | Sequence[Message],
        tools: Sequence[Callable[..., Any]],
        form: Form,
        *,
        seed: int,
        reward: str | None = None,
        reward_kwargs: Mapping[str, Any] | None = None,
        ground_truth: Any = None,
        **columns: Any,
    ) -> None:
        """Begin with ``prompt``. ``columns``: other columns of the row, for the reward function."""
        del seed
        self._scorer = _scorer_of(reward, reward_kwargs)
        self._truth, self._columns = ground_truth, columns
        super().__init__(prompt_messages(prompt), tools, form)

    @classmethod
    def check_reward(cls, kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if ``environment.kwargs`` has no usable reward function."""
        scorer = _scorer_of(kwargs.get("reward"), kwargs.get("reward_kwargs"))
        if scorer is None and cls.answered is ScoredTools.answered:
            raise ConfigError(
                "environment.kwargs.reward is not set, and tools return no reward. Set a reward "
                "function, such as aligner.examples.tasks.exact_number:reward"
            )

    def answered(self, text: str) -> Turn:
        """Score the answer."""
        if self._scorer is None:
            return Turn(done=True)
        # An environment does not know whether its message was cut.
        columns = {"is_end": True, MESSAGES: self.messages, **self._columns}
        lists = {name: [value] for name, value in columns.items()}
        samples = Samples([self.question()], [text], [self._truth], lists)
        rewards, parts = self._scorer.score(samples)
        metrics = {name: values[0] for name, values in parts.items()}
        return Turn(reward={"reward": rewards[0], **metrics}, done=True)


def _scorer_of(reward: str | None, kwargs: Mapping[str, Any] | None) -> LoadedFunction | None:
    """Load a reward function, which may have every form that ``reward.function`` accepts."""
    if reward is None:
        return None
    return LoadedFunction(loaded(reward, "reward"), reward, kwargs or {})


class FunctionTools(ScoredTools):
    """Environment that begins with the row's prompt and offers functions as tools."""

    def __init__(
        self,
        *,
        prompt: str | Sequence[Message],
        tools: Sequence[str],
        form: Form = "hermes",
        **others: Any,
    ) -> None:
        """Load the functions with the paths ``tools``. ``others``: arguments of `ScoredTools`."""
        functions = [load_function(tool, key="environment.tools") for tool in tools]
        super().__init__(prompt, functions, form, **others)

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` before the run if a tool or the reward function is unusable."""
        tools = [load_function(tool, key="environment.tools") for tool in kwargs["tools"]]
        names = Counter(json_schema(tool)["function"]["name"] for tool in tools)
        if repeated := [name for name, count in names.items() if count > 1]:
            name = repeated[0]
            raise ConfigError(f"environment.tools: two functions are named {name!r}. Rename one")
        cls.check_reward(kwargs)
