"""Which conversations are samples, and what they earn: cut ones, failed ones, unusable ones."""

import pytest
from conversations import TOKENIZER, HerePool, collected
from test_chat_data import chatml
from test_credit import credit
from test_endpoint_rollout import RUN, task
from test_endpoint_rollout import collected as agents_collected

from aligner.algorithms.rollout.endpoint import trajectory_of
from aligner.algorithms.rollout.environments import EnvironmentReward
from aligner.algorithms.rollout.rollout import score
from aligner.algorithms.rollout.validation import evaluate_responses
from aligner.algorithms.rs.trainer import best_of_each
from aligner.config import ImproperEndConfig
from aligner.environments import Start, Turn
from aligner.environments.protocol import check_turn
from aligner.errors import DataError, EnvironmentCallError
from aligner.serving.sessions import Session


class Scripted:
    """Answers each message with the next of the turns of ``script``, of the row's column."""

    def __init__(self, seed, script, question=None):
        self.script, self.question = iter(script), question or "?"

    def init(self):
        return Start([{"role": "user", "content": self.question}])

    def step(self, message):
        turn = next(self.script)
        if isinstance(turn, Exception):
            raise turn
        return turn


NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)
ON = [{"role": "user", "content": "on"}]
CALLS = [Turn(ON)] * 9  # is never scored
ANSWERS = [Turn(reward={"reward": 1.0, "accuracy": 1.0}, done=True)]
WITHOUT = [Turn(done=True)]  # the environment ends it and does not score it
CRASHES = [Turn(ON, {"reward": 2.0, "late": 1.0}), RuntimeError("gone")]


def rows(*scripts):
    return [{"script": script} for script in scripts]


def shaped(batch, mode="keep"):
    score(EnvironmentReward(), batch)
    improper = ImproperEndConfig(mode=mode, penalty=1.0)
    credit("reinforce", per_prompt=1, improper_end=improper).shape(batch)
    return batch["shaped_rewards"].tolist(), batch["sample_mask"].tolist()


@pytest.mark.parametrize(
    ("settings", "mode", "rewards", "mask"),
    [
        ({}, "keep", [0, 1, 0], [1, 1, 0]),
        ({}, "penalize", [-1, 1, 0], [1, 1, 0]),
        ({}, "mask", [0, 1, 0], [0, 1, 0]),
        ({"unscored": "mask"}, "keep", [0, 1, 0], [0, 1, 0]),
        ({"unscored": "mask"}, "penalize", [-1, 1, 0], [0, 1, 0]),
    ],
)
@pytest.mark.parametrize("limit", [{"max_turns": 2}, {"max_tokens": 60}])
def test_a_conversation_that_a_limit_ended_is_a_sample(limit, settings, mode, rewards, mask):
    batch = collected(Scripted, rows(CALLS, ANSWERS, WITHOUT), **limit, **settings)
    assert batch["is_scored"].tolist() == [0, 1, 0]
    assert shaped(batch, mode) == (rewards, mask)


def test_cut_conversations_count_in_training_and_rejection_sampling():
    asked = rows(CALLS, ANSWERS, WITHOUT)
    zero = score(EnvironmentReward(), collected(Scripted, asked, max_turns=2))
    mask = score(EnvironmentReward(), collected(Scripted, asked, max_turns=2, unscored="mask"))
    assert (zero["rewards"], zero["accuracy"], zero["accuracy_of_answered"]) == (0.5, 0.5, 1)
    assert (mask["rewards"], mask["accuracy"], mask["accuracy_of_answered"]) == (1, 1, 1)
    assert zero["unscored_samples"] == mask["unscored_samples"] == 2
    batch = collected(Scripted, rows(CALLS, ANSWERS, CALLS, WITHOUT), max_turns=2)
    score(EnvironmentReward(), batch)
    rewards = batch["rewards"].masked_fill(batch["sample_mask"] == 0, float("-inf"))
    assert best_of_each(rewards, 4, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("unscored", ["zero", "mask"])
def test_validation_counts_every_conversation(unscored):
    asked = rows(*[CALLS] * 6, WITHOUT, ANSWERS)
    batch = collected(Scripted, asked, max_turns=2, unscored=unscored)
    found = evaluate_responses(batch, 4, EnvironmentReward(), str)
    # Roles and rewards of the transcript are no answer.
    assert batch["answers"] == [turns[-1]["content"] for turns in batch["turns"]]
    assert found.metrics["accuracy"] == found.metrics["rewards"] == 0.125
    assert found.metrics["accuracy_of_answered"] == 1.0
    assert found.metrics["unscored_samples"] == 7
    for name in ("accuracy", "rewards", "mean_at_4", "pass_at_1"):
        assert found.estimates[name].value == 0.125, name


@pytest.mark.parametrize("unscored", ["zero", "mask"])
def test_a_rollout_that_limits_ended_is_no_error(unscored, caplog):
    batch = collected(Scripted, rows(CALLS), max_turns=2, unscored=unscored)
    assert batch["sample_mask"].tolist() == [float(unscored == "zero")]
    assert "scored none of the 1 conversations" in caplog.text
    assert evaluate_responses(batch, 1, EnvironmentReward(), str).metrics["accuracy"] == 0.0


def test_a_conversation_that_failed_earns_nothing_on_request():
    batch = collected(Scripted, rows(CRASHES, ANSWERS), failed="zero", retries=0)
    assert batch["end_reasons"] == ["failed", "done"]
    assert batch["failures"] == [["env_error"], []]
    assert batch["turn_ids"].amax(1).tolist() == [2, 1]
    assert batch["turn_rewards"].sum(1).tolist() == [0, 1]  # what it earned before is lost
    assert batch["is_scored"].tolist() == [0, 1]
    assert batch["reward_parts"][0] == {}
    assert "gone" in batch["turns"][0][-1]["info"]["failure"]
    assert shaped(batch, "penalize") == ([-1, 1], [1, 1])
    metrics = score(EnvironmentReward(), batch)
    assert (metrics["ended_failed"], metrics["failed_env_error"]) == (0.5, 1)
    with pytest.raises(EnvironmentCallError, match=r"more than environment.retries=1.*gone"):
        collected(Scripted, rows(CRASHES, ANSWERS), retries=1)


def test_what_fails_before_the_policy_spoke_begins_again():
    class NeverBegins(Scripted):
        def init(self):
            raise RuntimeError("not today")

    with pytest.raises(EnvironmentCallError, match=r"retries=2.*not today"):
        collected(NeverBegins, rows(ANSWERS), failed="zero", retries=2)


FINE = {"script": [Turn(ON, 1.0), Turn(ON, 2.0), Turn(reward=3.0, done=True)]}
SPEAKS_AS_A_TOOL = {"script": [Turn([{"role": "tool", "content": "x"}])]}
BEGINS_TOO_LONG = {**FINE, "question": "a" * 500}
EARNS_TOO_MUCH = {"script": [Turn(ON, 3e38), Turn(reward=3e38, done=True)]}


@pytest.mark.parametrize("spoiled", [SPEAKS_AS_A_TOOL, BEGINS_TOO_LONG, EARNS_TOO_MUCH])
def test_a_conversation_that_cannot_be_used_is_not_repeated(spoiled):
    options = {"tokenizer": chatml(NO_TOOLS), "pool": HerePool(Scripted)}
    asked, fails_at_once = [spoiled, FINE], spoiled is BEGINS_TOO_LONG
    with pytest.raises(EnvironmentCallError, match=r"environment 'here': .* is not repeated"):
        collected(Scripted, asked, failed="zero" if fails_at_once else "retry", **options)
    assert options["pool"].names.count("close") == 1
    if not fails_at_once:
        batch = collected(Scripted, asked, failed="zero", **options)
        assert batch["end_reasons"] == ["failed", "done"]
        assert batch["turn_rewards"].sum(1).tolist() == [0.0, 6.0]


@pytest.mark.integration
def test_rewards_of_an_agent_that_are_too_large_together_are_a_failure():
    with pytest.raises(EnvironmentCallError, match=r"agent .*add up to 6e\+38, beyond float32"):
        agents_collected([task("earns_too_much")], **RUN)


def test_accuracy_is_the_last_that_was_reported_and_a_share():
    def turn(value, *, done=False):
        return Turn([] if done else ON, {"reward": 1.0, "accuracy": value, "late": 1.0}, done)

    script = [turn(1.0), turn(0.5), Turn(ON, 1.0), turn(None), turn(0.25, done=True)]
    again = [Turn(ON, {"reward": 1.0, "accuracy": 1.0}), Turn([], 0.0, done=True)]
    batch = collected(Scripted, rows(script, again))
    assert batch["reward_parts"] == [{"accuracy": 0.25, "late": 4.0}, {"accuracy": 1.0}]
    metrics = score(EnvironmentReward(), batch)
    assert metrics["accuracy"] == 0.625
    assert metrics["reward_parts/late"] == 2.0  # a missing part is 0
    for value in (1.5, -0.1, 2):
        with pytest.raises(DataError, match=f"accuracy is {value}. It must be from"):
            check_turn(Turn(reward={"reward": 1.0, "accuracy": value}, done=True))
        with pytest.raises(DataError, match="accuracy"):
            Session(1).set_reward({"reward": 1.0, "accuracy": value})


def test_parts_of_an_answer_count_once():
    """A reward before the first answer and one behind it are of the same answer."""
    session = Session(1)
    session.set_reward({"reward": 0.0, "format": 1.0, "early": 1.0})
    [request] = session.admit([[1, 2]], 4, 1)
    session.record([1, 2], [3, 4], [-1.0, -1.0], "stop", "x", request)
    session.set_reward({"reward": 1.0, "format": 1.0})
    found = trajectory_of(session, TOKENIZER, {})
    assert found.parts == {"format": 1.0}
    assert sum(found.rewards) == 1.0
