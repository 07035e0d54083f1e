"""Conversations one step ahead: a thread conducts them while the policy really trains."""

import threading

import pytest
import torch
import user_environments as envs
from test_environment_rollout import HerePool, rollouts_with, same
from test_overlap import ROWS, Run, ThreadedEngine, configuration, fill

from aligner.algorithms.rollout.environments import EnvironmentReward
from aligner.algorithms.rollout.rollout import score
from aligner.algorithms.rollout.trainer import Rollouts
from aligner.checkpoint.run_state.tree import normalise, read_tree, write_tree
from aligner.config.environment import EnvironmentConfig
from aligner.data.batches import Prompt
from aligner.data.prompts import PromptDataset
from aligner.errors import EnvironmentCallError

pytestmark = pytest.mark.integration

EPISODES = PromptDataset(
    [Prompt(i, "", [], None, {"name": f"{i}", "turns": 1 + i % 3, "at": {1, 2}}) for i in range(6)]
)


class Played(Run):
    """A run over conversations."""

    def __init__(self, path, in_flight="finish", make=envs.Echo, ahead=True, **settings):
        super().__init__(path, in_flight)
        config = EnvironmentConfig(factory="here", max_tokens=200, **settings)
        self.pool = HerePool(lambda **given: make(**given))
        environments = rollouts_with(config, self.pool, self.policy.tokenizer, 4)
        self.rollouts = Rollouts(
            configuration(path, async_rollouts=ahead, in_flight=in_flight),
            *(self.engine, EPISODES, self.sampler, 0, environments),
        )


@pytest.mark.parametrize("in_flight", ["finish", "abandon"])
@pytest.mark.parametrize("kind", [Run, Played])
def test_rollouts_are_one_step_old_and_survive_a_restart(tiny_nemo, tmp_path, kind, in_flight):
    folder = tmp_path / "policy"
    folder.mkdir()
    whole = kind(tiny_nemo, in_flight)
    for number in (1, 2):
        whole.step(number)
    state = whole.save(folder)
    write_tree(tmp_path / "state", normalise(state["rollouts"]))  # with columns that it cannot take
    for number in (3, 4):
        whole.step(number)

    resumed = kind(tiny_nemo, in_flight)
    resumed.load({**state, "rollouts": read_tree(tmp_path / "state")}, folder)
    for number in (3, 4):
        resumed.step(number)
    for one, other in zip(whole.seen[2:], resumed.seen, strict=True):
        same(one, other)
    ids = [each for batch in whole.seen for each in batch["sample_ids"].tolist()]
    assert ids == list(range(4 * ROWS))

    ages = {1: 0, 2: 1, 3: 1 if in_flight == "finish" else 0, 4: 1}
    for step, age in ages.items():
        rollout = whole.seen[step - 1]
        mask = rollout["token_mask"]
        if kind is Played:
            assert rollout["turn_ids"].max() > 1
            metrics = score(EnvironmentReward(), rollout)
            assert metrics["rewards"] == rollout["turn_rewards"].sum(1).mean().item() > 1
        for other in range(min(2, step)):
            fill(whole.engine.own, whole.weights[step - 1 - other])
            logprobs = whole.engine.own.get_logprobs(rollout)["logprobs"] * mask
            close = torch.allclose(logprobs, rollout["generation_logprobs"], atol=1e-5)
            assert close == (other == age), (step, other)


def test_a_failure_is_raised_by_the_step_that_takes_the_rollout(tiny_nemo):
    class FailsLater(envs.Echo):
        made = 0

        def __init__(self, seed, **columns):
            super().__init__(seed, **columns)
            FailsLater.made += 1
            self.is_ahead = FailsLater.made > ROWS

        def step(self, message):
            if self.is_ahead:
                raise RuntimeError("later")
            return super().step(message)

    run = Played(tiny_nemo, make=FailsLater, retries=0)
    run.step(1)
    with pytest.raises(EnvironmentCallError, match=r"retries=0. The last failure: later"):
        run.step(2)
    run.rollouts.close()  # may follow


def test_abandoned_conversations_end_after_their_round(tiny_nemo, monkeypatch, caplog):
    run = Played(tiny_nemo, "abandon")
    asked, go_on, ahead = threading.Event(), threading.Event(), []
    generate = ThreadedEngine.generate

    def waits(engine, data, greedy=False, *, seed=0):
        if threading.current_thread() is not threading.main_thread():
            ahead.append(data)
            asked.set()
            assert go_on.wait(60)
        return generate(engine, data, greedy, seed=seed)

    monkeypatch.setattr(ThreadedEngine, "generate", waits)
    monkeypatch.setattr(ThreadedEngine, "recover", lambda engine: engine.own.recover())
    run.step(1)
    assert asked.wait(60)
    threading.Timer(0.2, go_on.set).start()
    run.rollouts.close()
    assert go_on.is_set()
    assert len(ahead) == 1  # no second batch
    assert "begins again" not in caplog.text  # as after a failure of the engine
    run.step(2)  # from the beginning, by the step that needs it
    assert run.seen[1]["turn_ids"].max() > 1
    run.rollouts.close()
