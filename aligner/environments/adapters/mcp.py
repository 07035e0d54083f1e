"""Tools of an MCP server, which is started for each conversation and speaks over its pipes."""

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aligner.data.chat import Message
from aligner.environments.adapters.foreign import (
    LoopThread,
    PromptedTools,
    imported,
    loaded,
    prompt_messages,
)
from aligner.environments.calls import Form
from aligner.environments.protocol import Turn
from aligner.errors import ConfigError
from aligner.rewards.function.execution import LoadedFunction
from aligner.rewards.protocol import Samples


class MCPEnv(PromptedTools):
    """The row's prompt beside the tools of an MCP server.

    A message without a call is the answer, which a reward function scores; messages with calls are
    not scored. The server is killed with the environment's process.
    """

    def __init__(
        self,
        *,
        seed: int,
        prompt: str | Sequence[Message],
        command: Sequence[str],
        reward: str | None = None,
        reward_kwargs: Mapping[str, Any] | None = None,
        ground_truth: Any = None,
        tools: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        form: Form = "hermes",
        **columns: Any,
    ) -> None:
        """Start the server and list its tools.

        Args:
            seed: not used: servers have none.
            prompt: the row's.
            command: the server's, as words.
            reward: a reward function, as ``reward.function`` names it (docs/ppo.md); it is given
                the last message of ``prompt`` and the answer.
            reward_kwargs: its further keyword arguments.
            ground_truth: the row's.
            tools: names of those that are offered; None: all.
            variables: the server's environment variables beside those that MCP hands on.
            form: of calls.
            columns: all others of the row, for the reward function.
        """
        del seed
        self._scorer = None if reward is None else _scorer(reward, reward_kwargs)
        self._truth, self._columns = ground_truth, columns
        mcp = imported("mcp", "mcp")
        self._loop = LoopThread()
        server = mcp.StdioServerParameters(
            command=command[0], args=list(command[1:]), env=dict(variables or {}) or None
        )
        self._session = self._loop.enter(_session(mcp, server))
        listed = self._listed()
        missing = sorted(set(tools or ()) - listed.keys())
        if missing:
            raise ConfigError(
                f"environment.kwargs.tools: the server has no {', '.join(missing)}; it has "
                f"{', '.join(listed)}"
            )
        chosen = [self._tool(name, listed[name]) for name in (tools or listed)]
        super().__init__(prompt_messages(prompt), chosen, form)

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Refuse a missing package, reward or command, before the run begins."""
        imported("mcp", "mcp")
        command = kwargs.get("command")
        if isinstance(command, str) or not command:
            raise ConfigError(
                f"environment.kwargs.command={command!r} must be a list of words, such as "
                "[python, my_server.py]"
            )
        if kwargs.get("reward") is not None:
            _scorer(kwargs["reward"], kwargs.get("reward_kwargs"))
        elif cls.answered is MCPEnv.answered:
            raise ConfigError(
                "environment.kwargs.reward is not set, and MCP servers score nothing; name a "
                "reward function, such as aligner.examples.tasks.exact_number:reward"
            )

    def answered(self, text: str) -> Turn:
        """Score the answer."""
        if self._scorer is None:
            return Turn(done=True)
        # An environment does not learn whether its message was cut.
        columns = {"is_end": [True], **{name: [each] for name, each in self._columns.items()}}
        rewards, parts = self._scorer.score(
            Samples([self.question()], [text], [self._truth], columns)
        )
        further = {name: values[0] for name, values in parts.items()}
        return Turn(reward={"reward": rewards[0], **further}, done=True)

    def close(self) -> None:
        """End the server."""
        self._loop.close()

    def _listed(self) -> dict[str, dict[str, Any]]:
        """Tools by their names, as MCP describes them."""
        found: dict[str, dict[str, Any]] = {}
        page = self._loop.run(self._session.list_tools())
        while True:
            for tool in page.tools:
                found[tool.name] = tool.model_dump(by_alias=True)
            cursor = page.model_dump(by_alias=True).get("nextCursor")
            if cursor is None:
                return found
            asked = imported("mcp.types", "mcp").PaginatedRequestParams(cursor=cursor)
            page = self._loop.run(self._session.list_tools(params=asked))

    def _tool(self, name: str, described: Mapping[str, Any]) -> Callable[..., str]:
        def call(**arguments: Any) -> str:
            result = self._loop.run(self._session.call_tool(name, arguments))
            return result_text(result.model_dump(by_alias=True, mode="json"))

        call.__name__ = re.sub(r"\W", "_", name)  # calls of the plain form are words
        call.json_schema = {  # type: ignore[attr-defined]
            "type": "function",
            "function": {
                "name": call.__name__,
                "description": described.get("description") or name,
                "parameters": {"properties": {}, **described["inputSchema"]},
            },
        }
        return call


@asynccontextmanager
async def _session(mcp: Any, server: Any) -> AsyncIterator[Any]:
    """A session with a server that is started for it; of mcp 1 and 2."""
    async with (
        mcp.stdio_client(server) as (reading, writing),
        mcp.ClientSession(reading, writing) as session,
    ):
        await session.initialize()
        yield session


def result_text(result: Mapping[str, Any]) -> str:
    """Text of a result in MCP's JSON form: its text blocks; of others their kind in brackets."""
    blocks = [
        block["text"] if block["type"] == "text" else f"[{block['type']}]"
        for block in result.get("content") or ()
    ]
    text = "\n".join(blocks) or str(result.get("structuredContent") or "")
    return f"error: {text}" if result.get("isError") else text


def _scorer(reward: str, kwargs: Mapping[str, Any] | None) -> LoadedFunction:
    return LoadedFunction(loaded(reward, "reward"), reward, kwargs or {})
