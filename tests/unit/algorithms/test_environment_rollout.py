"""Rollouts of conversations: whose tokens they are, where rewards stand, how they end."""

import os
import random
import signal
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import user_environments as envs

from aligner.algorithms.rollout.environments import EnvironmentReward, EnvironmentRollouts
from aligner.algorithms.rollout.rollout import prompts_batch, score
from aligner.config import LengthParams, SamplingParams
from aligner.config.environment import EnvironmentConfig
from aligner.data.batches import Prompt, collate_prompts
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.environments import Start, Turn
from aligner.environments.conversation import ChatRenderer, Conversation
from aligner.environments.pool import CallAnswer, EnvironmentPool, Failure
from aligner.environments.worker import Host, failure_kind
from aligner.errors import EnvironmentCallError

TOKENIZER = byte_level_tokenizer()
MOST = 4  # tokens of a response


class HerePool:
    """A pool without processes."""

    factory, name = "here", "environment 'here'"

    def __init__(self, make):
        self.make, self.hosts, self.most, self.answers = make, {}, 0, {}

    def begin(self, calls):
        for call in calls:
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
        self.most = max(self.most, len(self.hosts))
        try:
            value = self.hosts[call.slot].call(call.name, call.argument)
        except Exception as error:
            return Failure("env_error", str(error), kind=failure_kind(call.name, error))
        return CallAnswer(value)


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
        width = max(len(ids) for ids, *_ in rows)
        return BatchedDataDict(
            {
                "output_ids": torch.tensor([ids + [0] * (width - len(ids)) for ids, *_ in rows]),
                "unpadded_sequence_lengths": torch.tensor([len(ids) for ids, *_ in rows]),
                "generation_lengths": torch.tensor([0 for _ in rows]),
                "logprobs": torch.tensor([p + [0.0] * (width - len(p)) for _, p, _ in rows]),
                "is_end": torch.tensor([end for *_, end in rows]),
            }
        )

    def _row(self, ids, key, most):
        rng = random.Random(f"{key}/{ids}")
        new = [rng.randint(97, 122) for _ in range(rng.randint(1, most))]
        ended = rng.random() < 0.5
        if ended:
            new[-1] = 258
        return ids + new, [0.0] * len(ids) + [-rng.random() for _ in new], ended


def rollouts_with(config, pool, tokenizer=TOKENIZER, longest=MOST, **data):
    """Rollouts over a pool that is there; ``longest``: tokens of a response."""

    class Rollouts(EnvironmentRollouts):
        def _started_pool(self, columns):
            return pool

    rollout = SimpleNamespace(length_params=LengthParams(longest), sampling_params=SamplingParams())
    data = {"add_bos": False, "special_tokens_in_text": "keep", **data}
    run = SimpleNamespace(
        environment=config, model=SimpleNamespace(rollout=rollout), data=SimpleNamespace(**data)
    )
    return Rollouts(run, tokenizer, None, {}, ExitStack())


def collected(make, rows, per_prompt=1, first=0, engine=None, pool=None, **settings):
    config = EnvironmentConfig(factory="here", **{"max_tokens": 400, **settings})
    rollouts = rollouts_with(config, pool or HerePool(make), TOKENIZER)
    items = [Prompt(index, "", [], None, columns) for index, columns in enumerate(rows)]
    data = prompts_batch(collate_prompts(items, 0), first, per_prompt)
    return rollouts.collect(engine or Babble(), data, seed=3, per_prompt=per_prompt)


ROWS = [{"name": str(number), "turns": 1 + number % 4} for number in range(6)]


def of_row(seed, turns, **columns):
    return envs.Echo(seed, turns, **columns)


def same(one, other):
    assert one.keys() == other.keys()
    for key, column in one.items():
        equal = torch.equal(column, other[key]) if torch.is_tensor(column) else column == other[key]
        assert equal, key


def test_tokens_do_not_depend_on_who_else_is_under_way():
    pools = [HerePool(of_row) for _ in range(3)]
    batches = [
        collected(of_row, ROWS, 2, concurrency=slots, pool=pool)
        for slots, pool in zip((1, 5, 100), pools, strict=True)
    ]
    same(batches[0], batches[1])
    same(batches[0], batches[2])
    assert [pool.most for pool in pools] == [1, 5, 12]
    alone = collected(of_row, ROWS[3:4], first=3)
    assert torch.equal(alone["input_ids"][0], collected(of_row, ROWS)["input_ids"][3])


def test_a_group_shares_its_environments_seed_and_nothing_else():
    batch = collected(of_row, ROWS, 2, first=4)
    seeds = [turns[0]["info"]["seed"] for turns in batch["turns"]]
    assert seeds[0::2] == seeds[1::2]
    assert len(set(seeds)) == len(ROWS)
    assert not torch.equal(batch["input_ids"][2], batch["input_ids"][3])


def test_masks_rewards_and_log_probs_stand_at_sampled_tokens():
    batch = collected(of_row, ROWS)
    mask, turns = batch["token_mask"], batch["turn_ids"]
    assert torch.equal(mask, (turns > 0).float())
    assert torch.equal(batch["generation_logprobs"] != 0, mask.bool())
    assert torch.equal(batch["prompt_lengths"], mask.argmax(1))  # the first sampled token
    places = torch.arange(1, mask.shape[1] + 1)
    assert torch.equal(batch["input_lengths"], (mask * places).amax(1).long())  # and the last
    for row, settings in enumerate(ROWS):
        count = settings["turns"]
        assert turns[row].max() == count
        for turn in range(1, count + 1):
            places = (turns[row] == turn).nonzero().flatten()
            assert torch.equal(places, torch.arange(places[0], places[-1] + 1))
            expected = torch.zeros(len(places))
            expected[-1] = turn
            assert torch.equal(batch["turn_rewards"][row][places], expected)
        assert batch["turn_rewards"][row].sum() == count * (count + 1) / 2
    assert batch["is_end"].all()
    shown = batch["responses"][1].splitlines()
    assert shown[0].endswith("[+1]")
    assert shown[1] == f"[user] you said {len(batch['turns'][1][0]['content'])}"


def test_every_turn_and_attempt_has_random_numbers_of_its_own(tmp_path):
    engine = Babble()
    rows = [{"marker": str(tmp_path / "x")}]
    batch = collected(envs.FailsTwice, rows, first=5, engine=engine)
    ids = [each for call in engine.calls for each in call]
    assert len(set(ids)) == len(ids) == 5
    assert ids[0] == 5  # as in a rollout of one turn
    assert batch["failures"] == [["env_error", "env_error"]]


def test_ends_are_named():
    batch = collected(lambda **given: envs.Echo(turns=9, **given), [{}] * 2, max_turns=3)
    assert batch["end_reasons"] == ["max_turns"] * 2
    assert not batch["is_end"].any()
    assert batch["turn_ids"].amax(1).tolist() == [3, 3]
    batch = collected(lambda **given: envs.Echo(turns=99, **given), [{}] * 2, max_tokens=120)
    assert batch["end_reasons"] == ["max_tokens"] * 2
    assert batch["input_ids"].shape[1] <= 120
    assert (batch["turn_ids"][:, -1] > 0).any()  # nothing stands behind the last sampled token


def test_a_failed_conversation_is_no_sample(tmp_path):
    rows = [{"marker": str(tmp_path / "x")}] * 3
    batch = collected(envs.FailsTwice, rows, retries=2)
    assert batch.size == 3
    assert batch["turn_rewards"].sum(1).tolist() == [6.0] * 3  # none of them counts as 0
    metrics = score(EnvironmentReward(), batch)
    assert metrics["failed_env_error"] == 2
    (tmp_path / "x").unlink()
    said = r"2 conversations .*retries=1. The last failure: not"
    with pytest.raises(EnvironmentCallError, match=said):
        collected(envs.FailsTwice, rows, retries=1)


class Keeping(Babble):
    """Records with every token what a filter kept: the token, its successor, and the round.

    From the third round on responses are short: what was recorded before reaches beyond them.
    """

    def _row(self, ids, key, most):
        new = [97] * (4 if len(self.calls) < 3 else 1)
        return ids + new, [0.0] * len(ids) + [-1.0] * len(new), False

    def generate(self, *args, **kwargs):
        found = super().generate(*args, **kwargs)
        ids = found["output_ids"]
        attempt = torch.full_like(ids, len(self.calls))
        found["kept_ids"] = torch.stack([ids, ids + 1, attempt], 2).int()
        return found


def test_what_a_filter_kept_stands_at_its_token(tmp_path):
    """Turns are joined; of a conversation that failed nothing is left."""
    failing, calm = tmp_path / "x", tmp_path / "y"
    calm.write_text("xx")
    rows = [{"marker": str(failing), "turns": 3}, {"marker": str(calm), "turns": 1}]
    engine = Keeping()
    batch = collected(envs.FailsTwice, rows, engine=engine)
    assert batch["failures"] == [["env_error", "env_error"], []]
    kept, ids, turns = batch["kept_ids"], batch["input_ids"], batch["turn_ids"]
    assert kept.dtype == torch.int32
    assert kept.shape == (*ids.shape, 3)
    assert kept[turns == 0].unique().tolist() == [-1]  # what was read, and padding
    sampled = turns > 0
    assert torch.equal(kept[sampled][:, 0], ids[sampled].int())
    assert torch.equal(kept[sampled][:, 1], ids[sampled].int() + 1)
    assert turns[0].max() == 3
    for turn in (1, 2, 3):  # rounds 1 and 2 failed
        assert kept[0][turns[0] == turn][:, 2].unique().tolist() == [turn + 2]
    assert "kept_ids" not in collected(of_row, ROWS)


class Killing(Babble):
    """Kills the environment of slot 1 before it answers to the second round."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def generate(self, *args, **kwargs):
        found = super().generate(*args, **kwargs)
        if len(self.calls) == 2:
            os.kill(self.pool.pid(1), signal.SIGKILL)
        return found


@pytest.mark.integration
def test_a_killed_environment_touches_its_own_conversation_only():
    """In real processes: row 1 is begun again, the others are what they are undisturbed."""
    name = f"{Path(envs.__file__)}:Echo"
    rows = [{"name": str(number)} for number in range(3)]
    pool = EnvironmentPool(name, {}, ["name"])
    try:
        calm = collected(None, rows, pool=pool)
        shaken = collected(None, rows, pool=pool, engine=Killing(pool))
    finally:
        pool.close()
    assert shaken["failures"] == [[], ["env_error"], []]
    others = [batch.select_indices([0, 2]) for batch in (calm, shaken)]
    for batch in others:
        batch.truncate_tensors(1, int(batch["input_lengths"].max()))
    same(*others)
    assert shaken["turn_rewards"].sum(1).tolist() == [6.0] * 3
    assert score(EnvironmentReward(), shaken)["failed_env_error"] == 1


def test_what_is_not_scored_is_no_zero_and_parts_are_summed():
    rows = [{"what": "is_not_scored"}, {}, {"what": "is_not_scored", "at": 3}]
    batch = collected(lambda **given: envs.Does(turns=3, **given), rows)
    metrics = score(EnvironmentReward(), batch)
    assert batch["is_scored"].tolist() == batch["sample_mask"].tolist() == [0, 1, 1]
    assert batch["rewards"].tolist() == [0, 6, 3]
    assert (metrics["rewards"], metrics["rewards_min"], metrics["unscored_samples"]) == (4.5, 3, 1)
    assert metrics["accuracy"] == 1.0
    assert (metrics["turns"], metrics["ended_done"]) == (3, 1)
    assert metrics["generated_tokens"] == batch["token_mask"].sum()
    with pytest.raises(EnvironmentCallError, match="scored none of the 1 conversations"):
        collected(lambda **given: envs.Does(turns=3, **given), rows[:1])

    class Parts(envs.Echo):
        def step(self, message):
            turn = super().step(message)
            parts = {"reward": turn.score, "late": 1.0} if self.said > 1 else turn.score
            return Turn(turn.messages, parts, turn.done)

    rows = [{"turns": 3}, {"turns": 1}]
    metrics = score(EnvironmentReward(), collected(Parts, rows))
    assert metrics["reward_parts/late"] == 1.0  # (2 + 0) / 2


def test_rewards_of_steps_are_rewards_of_tokens():
    """Two steps that end with the first character, which is a token; nothing else is scored."""
    batch = collected(lambda **given: envs.Does(**given), [{"what": "scores_steps", "turns": 2}])
    (first, second) = ((batch["turn_ids"][0] == turn).nonzero()[0] for turn in (1, 2))
    assert batch["turn_rewards"][0].nonzero().flatten().tolist() == [first, second]
    assert batch["turn_rewards"][0].sum() == 1.5
    assert batch["is_scored"].tolist() == [1]
    assert batch["turns"][0][0]["steps"] == [(1, 0.25), (1, 0.5)]
    assert score(EnvironmentReward(), batch)["rewards"] == 1.5


def test_a_transcript_says_who_said_what_and_first_messages_leave_room():
    with pytest.raises(EnvironmentCallError, match=r"max_tokens=20: the first.*not repeated"):
        collected(envs.Echo, [{}], max_tokens=20)
    talk = Conversation(ChatRenderer(TOKENIZER), Start([{"role": "user", "content": "?"}]))
    talk.answered([ord("4"), 258], [-1.0, -1.0], True)
    talk.follow(Turn([{"role": "user", "content": "no"}], -0.5), goes_on=True)
    talk.answered([ord("5"), 258], [-1.0, -1.0], True)
    talk.follow(Turn(), goes_on=False)
    assert talk.text == "4 [-0.5]\n[user] no\n5 [not scored]"
