"""Environments and agents whose conversations `test_conversation_golden` compares to a record."""

import os
import time

from user_agents import Policy

from aligner.environments import Start, Turn
from aligner.environments.tools import ToolEnv, calculator


def meet(trouble, marker):
    """Do once what the trouble of a row says; ``marker``: the file that is there afterwards."""
    if not trouble or os.path.exists(marker):
        return
    open(marker, "w").close()
    if trouble == "raises":
        raise RuntimeError("not yet")
    if trouble == "dies":
        os._exit(3)
    if trouble == "hangs":
        time.sleep(60)


class Game:
    """A conversation of ``turns`` turns; rewards depend on the policy's text and the seed."""

    def __init__(self, seed, name, turns, trouble=None, marker=None):
        self.seed, self.name, self.turns = seed, name, turns
        self.trouble, self.marker, self.said = trouble, marker, 0

    def init(self):
        return Start([{"role": "user", "content": f"row {self.name}, {self.seed % 10}"}])

    def step(self, message):
        self.said += 1
        text = message["content"]
        if self.said == 2:
            meet(self.trouble, self.marker)
        if self.trouble == "unscored":
            return Turn([{"role": "user", "content": "on"}])
        done = self.said == self.turns
        reward = {"reward": sum(map(ord, text)) % 7 / 7, "letters": float(len(text))}
        if done:
            reward["accuracy"] = float(len(text) % 2)
        heard = [] if done else [{"role": "user", "content": f"{len(text)}; and {self.said}?"}]
        steps = [(1, 0.5)] if text and self.said % 2 else []
        return Turn(heard, reward if self.said != 2 else None, done, {"said": self.said}, steps)


class Tools(ToolEnv):
    """A question with a calculator; whatever is answered ends it."""

    def __init__(self, seed, name, **columns):
        super().__init__([calculator], "plain")
        self.name = name

    def question(self):
        return f"What is {self.name}+1?"

    def answered(self, text):
        return Turn(reward=float(len(text)), done=True)


def agent(base_url, api_key, seed, name, turns, trouble=None, marker=None):
    """Ask ``turns`` questions; every second one is a sub-agent's, with a history of its own."""
    policy = Policy(base_url, api_key)
    messages = []
    for number in range(turns):
        question = {"role": "user", "content": f"row {name}, {seed % 10}: {number}?"}
        if number % 2:
            answer = policy.ask([question])
        else:
            messages.append(question)
            answer = policy.ask(messages)
            messages.append(answer)
        if number == 1:
            meet(trouble, marker)
        if number % 3 == 0:
            policy.reward(sum(map(ord, answer["content"])) % 7 / 7)
    return {"reward": 1.0 / turns, "accuracy": turns % 2} if trouble != "unscored" else None
