"""Turns of agents behind an endpoint follow each other as they were requested.

Not as their tokens stand in the row, and not as the engine ended them.
"""

import itertools

import pytest
import torch
from test_credit import assign, credit

from aligner.algorithms.rollout.endpoint import trajectory_of
from aligner.algorithms.rollout.environments import EnvironmentReward, rollout_batch
from aligner.algorithms.rollout.rollout import score
from aligner.config import ImproperEndConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.serving.sessions import Session

TOKENIZER = byte_level_tokenizer()
ESTIMATORS = [
    *(("gae", "token", "trajectory"), ("gae", "turn", "trajectory")),
    *(("rloo", "token", "turn"), ("grpo", "token", "turn")),
    *(("reinforce_plus_plus", "token", credit) for credit in ("turn", "trajectory")),
]


def answered(session, prompt, text, request=None):
    """Record an answer of the engine; its prompt with it."""
    ids = [*TOKENIZER.encode(text), TOKENIZER.eos_id]
    whole = TOKENIZER.decode(prompt + ids)
    if request is None:  # the first that waits behind this prompt
        request = min(n for n, key in session._expected.items() if key == tuple(prompt))
    session.record(prompt, ids, [-0.1] * len(ids), "stop", whole, request)
    return prompt + ids


def asked(session, *prompts, answers=1):
    return list(session.admit(prompts, 8, answers))


def with_sub_agent(reward):
    """A1 asks a sub-agent, B1, whose answer A2 continues with."""
    session, main, sub = Session(), TOKENIZER.encode("main\n"), TOKENIZER.encode("sub\n")
    asked(session, main)
    main = answered(session, main, "A1") + TOKENIZER.encode("sub?\n")
    asked(session, sub)
    answered(session, sub, "B1")
    asked(session, main)
    answered(session, main, "A2")
    session.set_reward(reward)
    return session


def with_parallel_requests(reward, order=(0, 1, 2, 3)):
    """A first answer; four requests at once, three of them alike; a last one behind a fork.

    ``order``: in which the engine ends the four.
    """
    session, first = Session(), TOKENIZER.encode("first\n")
    asked(session, first)
    first = answered(session, first, "F")
    session.set_reward(0.5)
    same, other = first + TOKENIZER.encode("go on\n"), TOKENIZER.encode("other\n")
    waiting = [(same, number) for number in asked(session, same, answers=2)]
    waiting += [(other, number) for number in asked(session, other)]
    waiting += [(same, number) for number in asked(session, same)]
    for index in order:
        prompt, number = waiting[index]
        answered(session, prompt, "pqrs"[index] * (index + 1), number)
    session.set_reward(reward)
    last = first + TOKENIZER.encode("rewritten\n")
    asked(session, last)
    answered(session, last, "L")
    session.set_reward(2 * reward)
    return session


def rollout(sessions, reason="done"):
    rows = [trajectory_of(each, TOKENIZER, {}) for each in sessions]
    for row in rows:
        row.end_reason = reason
    lists = {"ground_truths": [None] * len(rows), "columns": [{}] * len(rows)}
    data = BatchedDataDict({"sample_ids": torch.arange(len(rows)), **lists})
    batch = rollout_batch(data, rows, TOKENIZER.pad_id, with_positions=True)
    score(EnvironmentReward(), batch)
    return batch


def assigned(batch, estimator, timestep, by, **options):
    """The batch with its advantages; values and KL are functions of turn and token."""
    discount = 1.0 if estimator in ("rloo", "grpo") else 0.9
    options |= {"timestep": timestep, "gae_lambda": 0.7, "discount_factor": discount}
    how = credit(estimator, by, kl_in_reward=True, per_prompt=batch.size, **options)
    noise = torch.sin(3.0 * batch["turn_ids"] + batch["input_ids"])
    batch["prev_logprobs"] = batch["generation_logprobs"]
    batch["ref_logprobs"] = batch["prev_logprobs"] + 0.1 * noise
    if estimator == "gae":
        batch["values"] = torch.cos(2.0 * batch["turn_ids"] + batch["input_ids"])
    assign(how, batch, 0.05)
    return batch


def by_answer(batch):
    """Advantages of each row's turns, by number and text."""
    found = []
    for row, turns in enumerate(batch["turns"]):
        for number, turn in enumerate(turns, start=1):
            tokens = batch["advantages"][row, batch["turn_ids"][row] == number]
            assert len(tokens) == turn["tokens"]
            found.append((row, number, turn["content"], turn["reward"], tokens.tolist()))
    return found


@pytest.mark.parametrize(("estimator", "timestep", "by"), ESTIMATORS)
def test_a_sub_agent_learns_from_what_comes_of_it(estimator, timestep, by):
    """Rewards 1 and 0: all turns are worth the same without a discount, KL or critic."""
    batch = rollout([with_sub_agent(1.0), with_sub_agent(0.0)])
    assert [turn["content"] for turn in batch["turns"][0]] == ["A1", "B1", "A2"]
    assert batch["turn_ids"][0].unique_consecutive().tolist() == [0, 1, 0, 3, 0, 2]
    last = (batch["turn_ids"][0] == 3).nonzero().max().item()
    assert batch["turn_rewards"][0].nonzero().flatten().tolist() == [last]
    if estimator == "gae":
        batch["values"] = torch.zeros_like(batch["token_mask"])
    assign(credit(estimator, by, timestep=timestep, gae_lambda=1.0), batch)
    first, second = (batch["advantages"][row][batch["turn_ids"][row] > 0] for row in (0, 1))
    torch.testing.assert_close(first, first[:1].expand_as(first))
    assert first[0] > second.max()


@pytest.mark.parametrize(("estimator", "timestep", "by"), ESTIMATORS)
@pytest.mark.parametrize("mode", ["keep", "penalize"])
def test_the_order_in_which_the_engine_ends_answers_does_not_matter(estimator, timestep, by, mode):
    improper = ImproperEndConfig(mode=mode)
    found = []
    for order in itertools.permutations(range(4)):
        batch = rollout([with_parallel_requests(1.0, order), with_sub_agent(0.0)], "max_turns")
        found.append(by_answer(assigned(batch, estimator, timestep, by, improper_end=improper)))
    assert [turn[2] for turn in found[0][:6]] == ["F", "p", "qq", "rrr", "ssss", "L"]
    assert [turn[3] for turn in found[0][:6]] == [0.5, None, None, None, 1.0, 2.0]
    assert all(each == found[0] for each in found)
