"""Rollouts of conversations in this process, with an engine that babbles."""

import random
from contextlib import ExitStack
from multiprocessing.connection import wait
from types import SimpleNamespace

import torch

from aligner.algorithms.rollout.environments import EnvironmentRollouts
from aligner.algorithms.rollout.rollout import prompts_batch
from aligner.config import LengthParams, SamplingParams
from aligner.config.environment import EnvironmentConfig
from aligner.data.batches import Prompt, collate_prompts
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.environments.pool import CallAnswer, Failure
from aligner.environments.worker import Host, failure_kind

TOKENIZER = byte_level_tokenizer()
MOST = 4  # tokens of a response


class HerePool:
    """A pool without processes."""

    factory, name = "here", "environment 'here'"

    def __init__(self, make):
        self.make, self.hosts, self.answers, self.names = make, {}, {}, []

    def begin(self, calls):
        for call in calls:
            self.names.append(call.name)
            self.answers[call.slot] = self._answer(call)
        return [0.0 for _ in calls]

    def answered(self, slots, timeout_s, wake):
        if not slots:
            wait([wake], timeout_s)
        return set(slots)

    def receive(self, call, began):
        return self.answers.pop(call.slot)

    def kill(self, slot):
        self.hosts.pop(slot, None)

    def close(self):
        self.hosts.clear()

    def _answer(self, call):
        if call.name == "begin":
            self.hosts[call.slot] = Host(self.make, {})
        try:
            value = self.hosts[call.slot].call(call.name, call.argument)
        except Exception as error:
            return Failure("env_error", str(error), kind=failure_kind(call.name, error))
        return CallAnswer(value)


def generated(rows, new_tokens=0):
    """What an engine returns, of token ids, log-probs and whether each row ended properly."""
    width = max(len(ids) for ids, *_ in rows)
    return BatchedDataDict(
        {
            "output_ids": torch.tensor([ids + [0] * (width - len(ids)) for ids, *_ in rows]),
            "unpadded_sequence_lengths": torch.tensor([len(ids) for ids, *_ in rows]),
            "generation_lengths": torch.tensor([new_tokens for _ in rows]),
            "logprobs": torch.tensor([p + [0.0] * (width - len(p)) for _, p, _ in rows]),
            "is_end": torch.tensor([end for *_, end in rows]),
        }
    )


class Babble:
    """An engine whose tokens depend on the prompt, the seed and the sample id only."""

    def __init__(self):
        self.calls = []

    def prepare_for_generation(self):
        return True

    def finish_generation(self):
        return True

    def generate(self, data, greedy=False, *, seed=None, sampling_options=None):
        most = MOST if sampling_options is None else sampling_options.length.max_length
        self.calls.append(data["sample_ids"].tolist())
        columns = (data[name].tolist() for name in ("input_ids", "input_lengths", "sample_ids"))
        rows = [
            self._row(ids[:length], f"{seed}/{sample}", most)
            for ids, length, sample in zip(*columns, strict=True)
        ]
        return generated(rows)

    def _row(self, ids, key, most):
        rng = random.Random(f"{key}/{ids}")
        new = [rng.randint(97, 122) for _ in range(rng.randint(1, most))]
        ended = rng.random() < 0.5
        if ended:
            new[-1] = 258
        return ids + new, [0.0] * len(ids) + [-rng.random() for _ in new], ended


def configuration(environment, longest=MOST):
    """Those settings of a run that rollouts read; ``longest``: tokens of a response."""
    rollout = SimpleNamespace(length_params=LengthParams(longest), sampling_params=SamplingParams())
    data = SimpleNamespace(add_bos=False, special_tokens_in_text="keep")
    return SimpleNamespace(
        environment=environment, model=SimpleNamespace(rollout=rollout), data=data
    )


def prompts_of(rows, per_prompt=1, first=0):
    """Prompts without a text, with ``rows`` as their columns."""
    items = [Prompt(index, "", [], None, columns) for index, columns in enumerate(rows)]
    return prompts_batch(collate_prompts(items, 0), first, per_prompt)


def rollouts_with(config, pool, tokenizer, longest):
    """Rollouts over a pool that is there."""

    class Rollouts(EnvironmentRollouts):
        def _started_pool(self, columns):
            return pool

    return Rollouts(configuration(config, longest), tokenizer, None, {}, ExitStack())


def collected(
    make, rows, per_prompt=1, *, first=0, engine=None, pool=None, tokenizer=TOKENIZER, **settings
):
    """A rollout over ``rows``, columns of the environment. ``settings``: of the environment."""
    longest = settings.pop("longest", MOST)
    config = EnvironmentConfig(factory="here", **{"max_tokens": 400, **settings})
    rollouts = rollouts_with(config, pool or HerePool(make), tokenizer, longest)
    data = prompts_of(rows, per_prompt, first)
    return rollouts.collect(engine or Babble(), data, seed=3, per_prompt=per_prompt)


def same(one, other):
    assert one.keys() == other.keys()
    for key, column in one.items():
        equal = torch.equal(column, other[key]) if torch.is_tensor(column) else column == other[key]
        assert equal, key
