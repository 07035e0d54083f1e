"""Tools of an MCP server, which is started for each conversation and connected by pipes."""

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aligner.data.chat import Message
from aligner.environments.calls import Form
from aligner.environments.functions import ScoredTools
from aligner.errors import ConfigError
from aligner_environments.foreign import LoopThread, imported


class MCPEnv(ScoredTools):
    """Environment that asks the row's prompt and offers the tools of an MCP server.

    The server is killed with the environment's process.
    """

    def __init__(
        self,
        *,
        prompt: str | Sequence[Message],
        command: Sequence[str],
        tools: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        form: Form = "hermes",
        **others: Any,
    ) -> None:
        """Start the server and list its tools. ``others``: reward and columns of `ScoredTools`.

        docs/environments_adapters.md describes the arguments.
        """
        # Start the server.
        mcp = imported("mcp", "mcp")
        self._loop = LoopThread()
        server = mcp.StdioServerParameters(
            command=command[0], args=list(command[1:]), env=dict(variables or {}) or None
        )
        self._session = self._loop.enter(_session(mcp, server))
        # The offered tools.
        available = self._tools_of_server()
        missing = sorted(set(tools or ()) - available.keys())
        if missing:
            raise ConfigError(
                f"environment.kwargs.tools: the server has no {', '.join(missing)}, only "
                f"{', '.join(available)}"
            )
        functions = [self._tool(name, available[name]) for name in (tools or available)]
        super().__init__(prompt, functions, form, **others)

    @classmethod
    def check_kwargs(cls, kwargs: Mapping[str, Any]) -> None:
        """Raise `ConfigError` before the run if the package, reward or command is missing."""
        imported("mcp", "mcp")
        command = kwargs.get("command")
        if isinstance(command, str) or not command:
            raise ConfigError(
                f"environment.kwargs.command={command!r} must be a list of words, such as "
                "[python, my_server.py]"
            )
        cls.check_reward(kwargs)

    def close(self) -> None:
        """End the server."""
        self._loop.close()

    def _tools_of_server(self) -> dict[str, dict[str, Any]]:
        """Return a mapping from the name of each tool to MCP's description."""
        tools: dict[str, dict[str, Any]] = {}
        page = self._loop.run(self._session.list_tools())
        while True:
            for tool in page.tools:
                tools[tool.name] = tool.model_dump(by_alias=True)
            cursor = page.model_dump(by_alias=True).get("nextCursor")
            if cursor is None:
                return tools
            params = imported("mcp.types", "mcp").PaginatedRequestParams(cursor=cursor)
            page = self._loop.run(self._session.list_tools(params=params))

    def _tool(self, name: str, tool: Mapping[str, Any]) -> Callable[..., str]:
        def call(**arguments: Any) -> str:
            result = self._loop.run(self._session.call_tool(name, arguments))
            return result_text(result.model_dump(by_alias=True, mode="json"))

        # Names of the plain form are words.
        call.__name__ = re.sub(r"\W", "_", name)
        # `aligner.environments.tools.json_schema` returns this schema.
        call.json_schema = {  # type: ignore[attr-defined]
            "type": "function",
            "function": {
                "name": call.__name__,
                "description": tool.get("description") or name,
                "parameters": {"properties": {}, **tool["inputSchema"]},
            },
        }
        return call


@asynccontextmanager
async def _session(mcp: Any, server: Any) -> AsyncIterator[Any]:
    """Start a server and open a session with it, for mcp 1 and 2."""
    async with (
        mcp.stdio_client(server) as (reading, writing),
        mcp.ClientSession(reading, writing) as session,
    ):
        await session.initialize()
        yield session


def result_text(result: Mapping[str, Any]) -> str:
    """Return the text blocks of a result in MCP's JSON form, and other blocks as ``[type]``."""
    blocks = [
        block["text"] if block["type"] == "text" else f"[{block['type']}]"
        for block in result.get("content") or ()
    ]
    text = "\n".join(blocks) or str(result.get("structuredContent") or "")
    return f"error: {text}" if result.get("isError") else text
