"""Conversations with the environments of docs/environments_adapters.md, as it names them."""

import re

from documented import blocks, commands
from hydra.core.override_parser.overrides_parser import OverridesParser

from aligner.algorithms.rollout.endpoint import EndpointRollouts
from aligner.environments.pool import Call, EnvironmentPool, Failure

PAGE = "docs/environments_adapters.md"
ADAPTERS = "aligner_environments"


def answers_of(pool, calls):
    """Make calls of different slots at the same time, each with its own time limit."""
    pairs = zip(calls, pool.begin(calls), strict=True)
    return [sent if isinstance(sent, Failure) else pool.receive(call, sent) for call, sent in pairs]


def say(text):
    """A message of the policy."""
    return {"role": "assistant", "content": text}


def write_files(folder, page=PAGE):
    """The files that a page shows, under their names."""
    for block in blocks():
        named = re.match(r"# (\w+\.py)\n", block.text)
        if block.page == page and named:
            (folder / named[1]).write_text(block.text)


def kwargs_of(module):
    """``environment.kwargs`` of the page's command with that module."""
    (command,) = (one for one in commands() if one.page == PAGE and f".{module}:" in one.text)
    (given,) = (word for word in command.words if word.startswith("environment.kwargs="))
    return OverridesParser.create().parse_override(given).value()


class Game:
    """One conversation with an environment in its process; a context manager.

    A name without a point is one of `aligner_environments`.
    """

    def __init__(self, name, kwargs, columns=None, seed=1):
        self.columns, self.seed = columns or {}, seed
        factory = name if "." in name else f"{ADAPTERS}.{name}"
        self.pool = EnvironmentPool(factory, kwargs, list(self.columns))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.pool.close()

    def call(self, what, argument=None, limit_s=60.0):
        return answers_of(self.pool, [Call(0, what, argument, limit_s)])[0]

    def begin(self):
        answer = self.call("begin", (self.seed, self.columns))
        assert hasattr(answer, "value"), answer
        return answer.value

    def say(self, text):
        answer = self.call("step", say(text))
        assert hasattr(answer, "value"), answer
        return answer.value


def kept_batches(monkeypatch):
    """A list that gets each batch of conversations with agents which a run collects."""
    batches, collect = [], EndpointRollouts.collect

    def keeping(*arguments, **named):
        batches.append(collect(*arguments, **named))
        return batches[-1]

    monkeypatch.setattr(EndpointRollouts, "collect", keeping)
    return batches


def turns_of(batch):
    """Of each row its turns: ids before it, ids that were sampled, their log-probs, the reward."""
    names = ("input_ids", "generation_logprobs", "turn_rewards", "turn_ids")
    for ids, logprobs, rewards, turn_ids in zip(*(batch[name] for name in names), strict=True):
        turns = []
        for turn in range(1, int(turn_ids.amax()) + 1):
            places = (turn_ids == turn).nonzero().flatten()
            assert places.diff().eq(1).all()
            one = (ids[: places[0]], ids[places], logprobs[places], rewards[places[-1]])
            turns.append([column.tolist() for column in one])
        yield turns
