"""Rollouts and conversations one step ahead, by a real engine in a thread of a policy's process."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import user_environments as envs
from conversations import HerePool, rollouts_with, same
from loaded import load_policy
from settings import parsed

from aligner.algorithms.rollout.environments import EnvironmentReward
from aligner.algorithms.rollout.rollout import prompts_batch, score
from aligner.algorithms.rollout.trainer import Rollouts
from aligner.checkpoint.run_state.tree import normalise, read_tree, write_tree
from aligner.checkpoint.run_state.worker_state import save_worker_state
from aligner.config.environment import EnvironmentConfig
from aligner.data.batches import Prompt, PromptSampler, collate_prompts
from aligner.data.prompts import PromptDataset
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import EnvironmentCallError
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.interfaces import BackgroundGeneration

pytestmark = pytest.mark.integration

ROWS = 4
PROMPTS = PromptDataset([Prompt(i, f"p{i}", [40 + i, 41, 42][: 2 + i % 2], None) for i in range(6)])


class ThreadedEngine(BackgroundGeneration):
    """Draws with a policy of its own, whose weights it fetches when they have changed."""

    def __init__(self, policy, own):
        self.policy, self.own = policy, own
        self.stale = True
        self.thread = ThreadPoolExecutor(1)

    def weights_changed(self):
        self.stale = True

    def prepare_for_generation(self):
        if self.stale:
            fill(self.own, weights_of(self.policy))
            self.stale = False
        self.own.prepare_for_generation()
        return True

    def generate(self, data, greedy=False, *, seed=0, sampling_options=None):
        return self.own.generate(data, greedy, seed=seed, sampling_options=sampling_options)

    def finish_generation(self):
        return True

    def generate_in_background(self, data, *, seed=0):
        future = self.thread.submit(self.generate, data, seed=seed)
        return SimpleNamespace(result=future.result, abandon=future.result)


def weights_of(policy):
    return [p.detach().clone() for p in policy.worker_group.worker.model.gpt.parameters()]


def fill(policy, weights):
    for parameter, weight in zip(
        policy.worker_group.worker.model.gpt.parameters(), weights, strict=True
    ):
        parameter.data.copy_(weight)


def configuration(path, **generation):
    sizes = {"micro_batch_size": ROWS, "global_batch_size": ROWS}
    ppo = {"num_rollout_samples": ROWS, "length_params": {"max_length": 4}}
    model = {"restore_from_path": str(path), **sizes, "optim": {"lr": 1.0e-2}, "ppo": ppo}
    config = parsed({"model": model, "critic": sizes})
    settings = dataclasses.replace(config.generation, **generation)
    return dataclasses.replace(config, generation=settings)


class Run:
    """Policy, engine and rollouts; a step takes a rollout and trains on it."""

    def __init__(self, path, in_flight, steps=4):
        config = configuration(path, async_rollouts=True, in_flight=in_flight)
        self.policy = load_policy(config.model)
        self.engine = ThreadedEngine(self.policy, load_policy(config.model))
        self.sampler = PromptSampler(len(PROMPTS), ROWS, seed=1)
        self.rollouts = Rollouts(config, self.engine, PROMPTS, self.sampler, 0)
        self.steps, self.consumed = steps, 0
        self.seen, self.weights = [], []

    def step(self, number):
        batch = self.rollouts.take(self.consumed, more=number < self.steps)
        self.consumed += batch.size
        self.seen.append(batch)
        self.weights.append(weights_of(self.policy))
        names = ("input_ids", "input_lengths", "token_mask", "sample_mask", "generation_logprobs")
        generator = torch.Generator().manual_seed(number)
        advantages = torch.randn(batch["input_ids"].shape, generator=generator)
        data = type(batch)({**{name: batch[name] for name in names}, "advantages": advantages})
        self.policy.prepare_for_training()
        self.policy.train(data, PPOPolicyLoss())
        self.policy.finish_training()
        self.engine.weights_changed()

    def save(self, folder):
        state = {"rollouts": self.rollouts.state_dict(), "sampler": self.sampler.state_dict()}
        save_worker_state(self.policy.worker_group.worker, folder)
        return {**state, "consumed": self.consumed}

    def load(self, state, folder):
        self.rollouts.load_state_dict(state["rollouts"])
        self.sampler.load_state_dict(state["sampler"])
        self.policy.load_state(folder)
        self.engine.weights_changed()
        self.consumed = state["consumed"]


def test_a_run_state_with_an_engines_own_columns_goes_on(tiny_nemo):
    """States of before 2026-11-23 have the responses of a rollout in flight as the engine does."""
    run = Run(tiny_nemo, "finish", 2)
    first = run.rollouts.take(0, more=True)
    state = run.rollouts.state_dict()
    expected = run.rollouts.take(first.size, more=False)
    data = prompts_batch(
        collate_prompts([PROMPTS[index] for index in state["indices"]], 0), first.size
    )
    own = run.engine.own.generate(data, seed=configuration(tiny_nemo).seed).to("cpu")
    assert "output_ids" in own

    run.rollouts.load_state_dict({"indices": state["indices"], "output": dict(own.items())})
    taken = run.rollouts.take(first.size, more=False)
    assert set(expected) >= {"prompts", "ground_truths", "columns"}
    same(expected, taken)


@pytest.mark.parametrize(
    ("accepted", "size", "kept"),
    [((), 6, "responses"), (("seed",), 6, "prompts"), (("data.train",), 3, "nothing")],
)
def test_what_was_begun_with_settings_that_changed_is_drawn_again(tiny_nemo, accepted, size, kept):
    """Else old responses would be scored by other prompts' ground truths, or by other rules."""
    config = configuration(tiny_nemo, async_rollouts=True)
    config = dataclasses.replace(
        config, exp_manager=dataclasses.replace(config.exp_manager, resume_changed=accepted)
    )
    prompts = PromptDataset([PROMPTS[index] for index in range(size)])
    sampler = PromptSampler(size, 2, seed=1)

    class Source:
        def collect(self, generation, data, *, seed, per_prompt):
            return BatchedDataDict({"drawn": data["input_ids"]})

    rollouts = Rollouts(config, None, prompts, sampler, 0, Source())
    rollouts.load_state_dict({"indices": [5, 0], "output": BatchedDataDict({"saved": [1, 2]})})
    batch = rollouts.take(0, more=False)
    assert ("saved" in batch) == (kept == "responses")
    assert (sampler.position == 2) == (kept == "nothing")
    if kept == "prompts":
        assert batch["drawn"][:, 0].tolist() == [45, 40]


EPISODES = PromptDataset(
    [Prompt(i, "", [], None, {"name": f"{i}", "turns": 1 + i % 3, "at": {1, 2}}) for i in range(6)]
)


class Played(Run):
    """A run over conversations."""

    def __init__(self, path, in_flight="finish", make=envs.Echo, **settings):
        super().__init__(path, in_flight)
        config = EnvironmentConfig(factory="here", max_tokens=200, **settings)
        self.pool = HerePool(lambda **given: make(**given))
        environments = rollouts_with(config, self.pool, self.policy.tokenizer, 4)
        self.rollouts = Rollouts(
            configuration(path, async_rollouts=True, in_flight=in_flight),
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
    with pytest.raises(EnvironmentCallError, match=r"retries=0.* The last failure: later"):
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
