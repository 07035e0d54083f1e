"""A run calls its callbacks in order and stops where they ask for it."""

import io
import random

import pytest
from test_run_loop import Counter, lines, run
from user_code import configured, directory_with

from aligner.algorithms.callbacks import Callback, Callbacks
from aligner.config.algorithms.process import CallbackConfig
from aligner.errors import ConfigError

CALLBACKS = """
from aligner.algorithms.callbacks import Callback


class Good(Callback):
    def __init__(self, limit=3):
        self.limit = limit


class Foreign:
    pass


class Misspelt(Callback):
    def on_step_ends(self, run, step, metrics):
        pass


class TooFew(Callback):
    def on_step_end(self, run, step):
        pass


class Unbuildable(Callback):
    def __init__(self):
        raise OSError("no journal")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    yield from directory_with(tmp_path, monkeypatch, "my_callbacks", CALLBACKS)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("my_callbacks.py:Bad", ["has no class 'Bad'", "Good"]),
        ("my_callbacks.py:Foreign", ["Foreign is not a", "callbacks.Callback"]),
        ("my_callbacks.py:Misspelt", ["on_step_ends", "Did you mean on_step_end?"]),
        ("my_callbacks.py:TooFew", ["on_step_end(self, run, step, metrics)"]),
        ("my_callbacks.py:Unbuildable", ["OSError: no journal"]),
        (
            CallbackConfig("my_callbacks.py:Good", {"limits": 1}),
            ["unexpected keyword argument 'limits'", "kwargs: {NAME: VALUE}"],
        ),
    ],
)
def test_a_callback_that_cannot_work_is_refused(here, entry, words):
    with pytest.raises(ConfigError) as caught:
        Callbacks.load(["my_callbacks.py:Good", entry])
    path = entry.callback if isinstance(entry, CallbackConfig) else entry
    for word in ("trainer.callbacks[1]=", path, *words):
        assert word in str(caught.value)


def test_callbacks_of_a_configuration(here):
    config = configured(trainer__callbacks=["a:B", {"callback": "c.py:D", "kwargs": {"x": 1}}])
    assert config.trainer.callbacks == ("a:B", CallbackConfig("c.py:D", {"x": 1}))
    assert config.as_dict()["trainer"]["callbacks"][1] == {"callback": "c.py:D", "kwargs": {"x": 1}}
    with pytest.raises(ConfigError, match=r"trainer\.callbacks\[0\].*a class"):
        configured(trainer__callbacks=[""])


class Recorder(Callback):
    def __init__(self, at=None):
        self.told, self.at, self.count = [], at or {}, 0

    def on_run_start(self, run, step):
        self._act(run, "run_start", step, run.total_steps)

    def on_step_end(self, run, step, metrics):
        self.count += 1
        names = sorted(metrics)
        metrics["train_rollouts/rewards"] = -1.0  # a copy
        self._act(run, "step_end", step, names)

    def on_validation_end(self, run, step, metrics):
        self._act(run, "validation_end", step, sorted(metrics))

    def on_save(self, run, step, path):
        assert (path / "state.json").exists()
        self._act(run, "save", step, path.name)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def _act(self, run, event, step, seen):
        self.told.append((event, step, seen))
        if (event, step) in self.at.items():
            run.stop(f"enough at {step}")


def told_by(recorder):
    callbacks = Callbacks(["trainer.callbacks[0]=m:R"], [recorder])
    callbacks.begin({"a": 1}, None, 6)
    return callbacks


REWARDS, ACCURACY = ["train_rollouts/rewards"], ["val_rollouts/accuracy"]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_tells_everything_in_order(tmp_path, async_save):
    recorder, plain = Recorder(), Counter()
    random.seed(3)
    run(tmp_path / "plain", plain)
    random.seed(3)
    ended, _ = run(tmp_path / "told", Counter(), callbacks=told_by(recorder), async_save=async_save)
    assert ended
    assert lines(tmp_path / "told") == lines(tmp_path / "plain")
    steps = [("step_end", step, REWARDS) for step in range(1, 7)]
    validations = [("validation_end", step, ACCURACY) for step in (0, 3, 6)]
    expected = [("run_start", 0, 6), validations[0], *steps[:3], validations[1], *steps[3:]]
    told = [one for one in recorder.told if one[0] != "save"]
    assert told == [*expected, validations[2]]
    saves = [one for one in recorder.told if one[0] == "save"]
    assert saves == [("save", step, f"step_{step:06d}") for step in (2, 4, 6)]


@pytest.mark.parametrize(
    ("event", "asked", "ends"),
    [("step_end", 2, 2), ("validation_end", 3, 3), ("run_start", 0, 1), ("save", 2, 3)],
)
def test_a_callback_stops_the_run_which_goes_on_later(tmp_path, event, asked, ends):
    random.seed(3)
    whole = Counter()
    run(tmp_path / "whole", whole)
    random.seed(3)
    stopping, learner = Recorder(at={event: asked}), Counter()
    said = io.StringIO()
    options = {"async_save": False} if event == "save" else {}
    ended, _ = run(tmp_path / "run", learner, callbacks=told_by(stopping), said=said, **options)
    assert ended  # as max_time does: the model is written
    assert learner.calls[-1] == ("validate", ends)
    assert f"stopped by a callback: enough at {asked} after step {ends} of 6" in said.getvalue()
    assert stopping.told[-1] == ("save", ends, f"step_{ends:06d}")
    later = Recorder()
    ended, restored = run(tmp_path / "run", Counter(), callbacks=told_by(later))
    assert (ended, restored.step) == (True, ends)
    assert later.told[0] == ("run_start", ends, 6)
    assert later.count == 6  # 2 + 4: the state of a callback is that of the run
    rewards = [line.get("train_rollouts/rewards") for line in lines(tmp_path / "run")]
    assert rewards == [line.get("train_rollouts/rewards") for line in lines(tmp_path / "whole")]


def test_a_stop_of_before_is_forgotten():
    recorder = Recorder(at={"step_end": 1})
    callbacks = told_by(recorder)
    callbacks.notify("on_step_end", 1, {})
    assert callbacks.stop_reason == "enough at 1"
    callbacks.begin({}, None, 6)  # workers on Ray were started anew
    callbacks.notify("on_step_end", 2, {})
    assert callbacks.stop_reason is None
