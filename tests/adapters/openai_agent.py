"""An agent that speaks with the policy by `openai.OpenAI` only, in an environment without aligner.

Two turns: the policy calls a tool and says its result. One of them is streamed, the other is not,
as the row's column ``streamed`` says. What the client saw is appended to the file ``saw``.
"""

import json
import os
import sys

from openai import BadRequestError, OpenAI

policy = OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])


def whole(**asked):
    answer = policy.chat.completions.create(**asked)
    [choice] = answer.choices
    logprobs = [each.logprob for each in choice.logprobs.content]
    assert answer.usage.completion_tokens == len(logprobs)
    ids = choice.model_extra["token_ids"]
    return choice.message, [answer.model_extra["prompt_token_ids"], ids, logprobs]


def streamed(**asked):
    prompt, ids, logprobs, calls = None, [], [], []
    message = {"role": "assistant", "content": ""}
    options = {"include_usage": True}
    for piece in policy.chat.completions.create(**asked, stream=True, stream_options=options):
        prompt = prompt or piece.model_extra.get("prompt_token_ids")
        usage = piece.usage
        for choice in piece.choices:
            message["content"] += choice.delta.content or ""
            calls += [call.to_dict() for call in choice.delta.tool_calls or []]
            ids += (choice.model_extra or {}).get("token_ids") or []
            logprobs += (
                [each.logprob for each in choice.logprobs.content] if choice.logprobs else []
            )
    assert usage.completion_tokens == len(logprobs)
    if calls:
        message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
    return message, [prompt, ids, logprobs]


def ask(turn, **asked):
    way = streamed if turn == task["streamed"] else whole
    extra = {"return_token_ids": True}
    message, seen = way(model="any", logprobs=True, extra_body=extra, **asked)
    turns.append(seen)
    return message if isinstance(message, dict) else message.to_dict()


def give(reward, **further):
    policy.post("/reward", body={"reward": {"reward": reward, **further}}, cast_to=object)
    turns[-1].append(reward)


task, turns = json.load(sys.stdin), []
messages = [{"role": "user", "content": task["prompt"]}]
try:
    policy.chat.completions.create(model="any", messages=messages, logit_bias={"1": 1})
    sys.exit("what the policy cannot follow was taken")
except BadRequestError as error:
    print(error.param)
said = ask(1, messages=messages, tools=task["tools"])
calls = said.get("tool_calls") or []
give(0.25 * len(calls), called=len(calls))
if calls:
    messages.append(said)
    for call in calls:
        result = str(2 * json.loads(call["function"]["arguments"])["number"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    right = float(ask(2, messages=messages, tools=task["tools"])["content"] == result)
    give(right, accuracy=right)
with open(task["saw"], "a") as file:
    file.write(json.dumps({"prefix": sys.prefix, "turns": turns}) + "\n")
