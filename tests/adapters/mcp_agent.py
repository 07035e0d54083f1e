"""An agent of MCP: it starts a server of tools, and offers them to the policy of `openai`.

What the client saw is appended to the file ``saw``.
"""

import asyncio
import json
import sys
from pathlib import Path

from mcp import ClientSession, StdioServerParameters, stdio_client
from openai import AsyncOpenAI

SERVER = Path(__file__).with_name("mcp_tools.py")


def offered(tool):
    described = tool.model_dump(by_alias=True)
    function = {"name": tool.name, "description": tool.description}
    return {"type": "function", "function": {**function, "parameters": described["inputSchema"]}}


async def results(session, calls):
    found = []
    for call in calls:
        arguments = json.loads(call.function.arguments)
        result = await session.call_tool(call.function.name, arguments)
        text = "".join(block.text for block in result.content)
        found.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return found


async def converse(policy, session, task):
    listed = await session.list_tools()
    asked = {"model": "any", "tools": [offered(tool) for tool in listed.tools], "logprobs": True}
    messages, turns = [{"role": "user", "content": task["prompt"]}], []
    while len(turns) < 3:
        answer = await policy.chat.completions.create(
            messages=messages, extra_body={"return_token_ids": True}, **asked
        )
        [choice] = answer.choices
        logprobs = [each.logprob for each in choice.logprobs.content]
        ids = choice.model_extra["token_ids"]
        turns.append([answer.model_extra["prompt_token_ids"], ids, logprobs, 0.0])
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            break
        messages += await results(session, choice.message.tool_calls)
    told = [one["content"] for one in messages if isinstance(one, dict) and one["role"] == "tool"]
    right = float(told[-1:] == [choice.message.content])
    reward = {"reward": right, "accuracy": right, "called": len(told)}
    await policy.post("/reward", body={"reward": reward}, cast_to=object)
    turns[-1][-1] = right
    with open(task["saw"], "a") as file:
        file.write(json.dumps({"prefix": sys.prefix, "turns": turns}) + "\n")


async def main():
    task = json.load(sys.stdin)
    policy = AsyncOpenAI()  # which finds OPENAI_BASE_URL and OPENAI_API_KEY by itself
    server = StdioServerParameters(command=sys.executable, args=[str(SERVER)])
    async with stdio_client(server) as pipes, ClientSession(*pipes) as session:
        await session.initialize()
        await converse(policy, session, task)


asyncio.run(main())
