"""Requests of `openai.OpenAI` to a server whose address and key are the arguments."""

import sys

from openai import AuthenticationError, OpenAI

url, key = sys.argv[1:]
client = OpenAI(base_url=url, api_key=key)
[model] = client.models.list()
messages = [{"role": "user", "content": "1+1="}]
asked = {"model": model.id, "messages": messages, "max_tokens": 8, "seed": 1}
whole = client.chat.completions.create(**asked, logprobs=True)
pieces = client.chat.completions.create(**asked, stream=True)
said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
assert said == whole.choices[0].message.content
assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
try:
    OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
except AuthenticationError:
    sys.exit(0)
sys.exit("a wrong key was taken")
