"""Agents of a user's own, for the tests: a function each, and a command that runs the one of a row.

They write what they saw of the policy to the file of the row's column ``saw``.
"""

import asyncio
import contextlib
import json
import os
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request


class Policy:
    """The policy behind the address."""

    def __init__(self, base_url, api_key, saw=None):
        self.base_url, self.api_key, self.saw = base_url, api_key, saw

    def post(self, path, **body):
        request = urllib.request.Request(
            f"{self.base_url}/{path}",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error.code} {error.read().decode()}") from error

    def ask(self, messages, **more):
        answer = self.post(
            "chat/completions", messages=messages, logprobs=True, return_token_ids=True, **more
        )
        choice = answer["choices"][0]
        if self.saw:
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            seen = [answer["prompt_token_ids"], choice["token_ids"], logprobs]
            with open(self.saw, "a") as file:
                file.write(json.dumps(seen) + "\n")
        return choice["message"]

    def reward(self, value):
        self.post("reward", reward=value)


def said(text):
    return {"role": "user", "content": text}


def two_turns(policy, task):
    messages = [said(f"row {task['name']}")]
    messages += [policy.ask(messages), said("and?")]
    policy.ask(messages)
    policy.reward({"reward": 1.0, "accuracy": 1})


def each_turn(policy, task):
    messages = [said(task["name"])]
    for reward in (0.25, None, {"reward": 2.0, "found": 1.0}):
        messages += [policy.ask(messages), said("and?")]
        policy.reward(reward)


def own_sampling(policy, task):
    policy.ask([said(task["name"])], max_tokens=2, model="gpt-x")
    policy.ask([said("?")], max_completion_tokens=99, temperature=0, top_p=0.1, seed=1)
    policy.reward(1.0)


def asks_on(policy, task):
    for number in range(99):
        policy.ask([said(f"{number}?")])
        policy.reward(number)


def asks_much(policy, task):
    policy.ask([said("x" * 5000)])


def asks_again(policy, task):
    """As clients do that try again after a status of 500."""
    ask = policy.ask

    def twice(messages):
        try:
            return ask(messages)
        except RuntimeError:
            return ask(messages)

    policy.ask = twice
    two_turns(policy, task)


def passes_over(policy, task):
    try:
        two_turns(policy, task)
    except RuntimeError:
        policy.reward(-5.0)


def unscored(policy, task):
    policy.ask([said("?")])


def earns_too_much(policy, task):
    for _ in range(2):
        policy.ask([said("?")])
        policy.reward(3e38)


def asks_nothing(policy, task):
    print("nothing to do")


def crashes(policy, task):
    policy.ask([said("?")])
    print("the cause of it")
    sys.exit(3)


def hangs(policy, task):
    policy.ask([said("?")])
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    with open(task["marker"], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def hangs_once(policy, task):
    if not os.path.exists(task["marker"]):
        hangs(policy, task)
    two_turns(policy, task)


def half_an_answer(policy, task):
    """The header of an answer on every open file, and nothing behind it."""
    policy.ask([said("?")])
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if number > 2:
                os.write(number, struct.pack("!4sQ", b"\x93ALN", 1000))
    time.sleep(600)


def takes_its_time(policy, task):
    """Ask every half second: no single wait reaches the time limit, but all together do."""
    messages = []
    for _ in range(6):
        messages += [said("?")]
        messages += [policy.ask(messages)]
        time.sleep(0.5)
    policy.reward(1.0)


def floods(policy, task):
    policy.ask([said("?")])
    for _ in range(200):
        print("x" * 10_000)
    print("the end")
    policy.reward(1.0)


def act(task, base_url, api_key):
    globals()[task["what"]](Policy(base_url, api_key, task.get("saw")), task)


def run(base_url, api_key, **task):
    """The same as a function."""
    act(task, base_url, api_key)


async def returns(base_url, api_key, seed, what, scale=1.0, **columns):
    policy = Policy(base_url, api_key)
    await asyncio.to_thread(policy.ask, [said(what)])
    assert os.environ["OPENAI_API_KEY"] == api_key
    return {"reward": scale, "seed": seed % 1000}


def graded(base_url, api_key, name, **columns):
    """Two turns; the reward is the length of what was said."""
    policy = Policy(base_url, api_key)
    messages = [said(name)]
    messages += [policy.ask(messages), said("?")]
    messages.append(policy.ask(messages))
    return len(messages[1]["content"] + messages[3]["content"]) + 0.5


if __name__ == "__main__":
    act(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
