"""The life of a run and its callbacks, with a learner that is a counter."""

import io
import os
import random
import signal
from types import SimpleNamespace

import pytest
import torch
from newest_state import snapshot
from recipes import numbers as lines
from rich.console import Console

from aligner.algorithms.callbacks import Callback, Callbacks
from aligner.algorithms.run import stopping
from aligner.algorithms.run.loop import RunLoop, Schedule, StepResult
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.checkpoint.run_state.tree import read_tree
from aligner.checkpoint.run_state.worker_state import ShareWriter
from aligner.errors import CheckpointError, NonFiniteError, StorageError
from aligner.observe.metrics import MetricsWriter, Sample, read_samples


class Counter:
    """Its number after a step depends on the state and on Python's random generator."""

    is_out_of_data = False

    num_shares = 1  # a role of one worker

    def __init__(self, at_step=None, stuck=(), warns=()):
        """``stuck``: steps that skip all updates; ``warns``: steps with a warning."""
        self.total = 0.0
        self.weight = torch.zeros(1000, dtype=torch.float64)
        self.calls = []
        self.at_step, self.stuck, self.warns = at_step or {}, stuck, warns
        parallel = SimpleNamespace(rank=0, world_size=1, layout_in_words="1 process")
        state = SimpleNamespace(parallel=parallel, state_dict=lambda: {"total": self.weight})
        self.writer = ShareWriter(state)

    def step(self, step, timers):
        with timers("work"):
            self.total += random.random()
        self.calls.append(("step", step))
        self.at_step.get(step, lambda: None)()
        sample = Sample(step, "train", "p", "r", 1.0, 1, 1, True)
        idle = ("policy",) if step in self.stuck else ()
        warnings = (f"number {step} is odd",) if step in self.warns else ()
        return StepResult({"train_rollouts/rewards": self.total}, [sample], idle, warnings)

    def validate(self, step, timers):
        self.calls.append(("validate", step))
        return StepResult({"val_rollouts/accuracy": self.total})

    def state_dict(self):
        return {"total": self.total}

    @property
    def roles(self):
        return {"role": self}

    def prepare_saving(self):
        self.calls.append(("prepare", self.total))
        self.writer.prepare()

    def begin_saving(self, folder, in_background):
        self.weight.fill_(self.total)
        self.writer.begin(str(folder), in_background)
        self.weight.fill_(float("nan"))  # training goes on

    def check_saving(self, wait):
        if (failure := self.writer.failure(wait)) is not None:
            raise StorageError(failure)

    def load(self, state, folder):
        self.total = state["total"]
        share = read_tree(folder / "role" / "rank_00000.pt")
        assert share["state"]["total"].tolist() == [self.total] * 1000


def run(folder, learner, *, total=6, save=2, val=3, seconds=None, said=None, **options):
    """Whether a run was not interrupted, and what it restored."""
    config, in_background = options.pop("config", {"a": 1}), options.pop("async_save", True)
    loop = RunLoop(
        learner,
        Schedule(total, val, save, seconds, max_skipped_steps=3, async_save=in_background),
        store=RunStateStore(folder / "run_state", 1, "val_rollouts/accuracy", save_last_k=2),
        metrics=MetricsWriter(folder),
        console=Console(quiet=said is None, file=said, width=200),
        config=config,
        monitor="val_rollouts/accuracy",
        **options,
    )
    restored = loop.restore()
    loop.run()
    loop.metrics.close()
    return not loop.interrupted, restored


@pytest.fixture
def uninterrupted(tmp_path):
    random.seed(3)
    folder = tmp_path / "whole"
    assert run(folder, Counter()) == (True, None)
    return lines(folder)


def test_validates_before_when_due_and_at_the_end(tmp_path):
    learner = Counter()
    run(tmp_path, learner, total=4, val=3)
    assert [step for kind, step in learner.calls if kind == "validate"] == [0, 3, 4]
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [0, 1, 2, 3, 4]
    assert ["val_rollouts/accuracy" in line for line in written] == [True, False, False, True, True]
    assert len(read_samples(tmp_path / "samples.jsonl")) == 4
    learner = Counter()
    run(tmp_path / "ends", learner, total=3, val=0, save=0)
    assert [step for kind, step in learner.calls if kind == "validate"] == [0, 3]
    store = RunStateStore(tmp_path / "ends" / "run_state")
    assert [state.step for state in store.states()] == [3]


def test_a_run_ends_early_by_its_data_or_its_time(tmp_path):
    learner = Counter()
    learner.at_step[2] = lambda: setattr(learner, "is_out_of_data", True)
    ended, _ = run(tmp_path, learner, total=6, val=0, save=0)
    assert ended
    assert learner.calls == [("validate", 0), ("step", 1), ("step", 2), ("validate", 2)]
    again = Counter()
    again.is_out_of_data = True
    ended, restored = run(tmp_path, again, total=6)
    assert (ended, restored.step, again.calls) == (True, 2, [])
    learner = Counter()
    ended, _ = run(tmp_path / "short", learner, seconds=0.0)
    assert ended
    assert learner.calls == [("validate", 0), ("step", 1), ("validate", 1)]
    assert [s.step for s in RunStateStore(tmp_path / "short" / "run_state").states()] == [1]


class Killed(BaseException):
    """Stands for SIGKILL: nothing may be tidied up after it."""


def die():
    raise Killed


@pytest.mark.parametrize(
    ("async_save", "save", "prepares"), [(True, 2, 1), (True, 1, 0), (True, 0, 0), (False, 2, 0)]
)
def test_memory_of_the_first_copy_is_taken_after_the_first_step(
    tmp_path, async_save, save, prepares
):
    learner = Counter()
    run(tmp_path, learner, total=4, save=save, async_save=async_save)
    kinds = [kind for kind, _ in learner.calls if kind in ("prepare", "step")]
    assert kinds == ["step", *["prepare"] * prepares, "step", "step", "step"]


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("killed_in", [1, 2, 3, 4, 5, 6])
def test_a_killed_run_continues_to_the_bit(tmp_path, uninterrupted, killed_in, async_save):
    random.seed(3)
    with pytest.raises(Killed):
        run(tmp_path, Counter({killed_in: die}), async_save=async_save)
    # The state restores the generator; where none is, the run starts again.
    random.seed(99 if RunStateStore(tmp_path / "run_state").states() else 3)
    ended, restored = run(tmp_path, Counter(), async_save=async_save)
    assert ended
    last = (killed_in - 1) // 2 * 2
    reached = {last, last - 2} if async_save else {last}  # one may have been on its way
    assert (restored.step if restored else 0) in reached
    assert lines(tmp_path) == uninterrupted


def test_a_longer_run_continues_and_says_what_changed(tmp_path):
    """A key of a later version is a change only where it is not its default."""
    older = {"trainer": {"max_steps": 2}, "critic": None, "gone": 0}
    newer = {
        "trainer": {"max_steps": 4, "kept": [1], "other": 2},
        "critic": {"lr": 0.1},
        "dry_run": False,
        "optional": {"name": "a", "path": None},
        **{"list": [1, 2], "nothing": [], "no_keys": {}, "none": None},
    }
    defaults = {**newer, "trainer": {"max_steps": 9, "kept": [1], "other": 3}, "list": []}
    for empty in ("nothing", "no_keys", "none"):
        del defaults[empty]
    run(tmp_path, Counter(), total=2, config=older)
    ended, restored = run(tmp_path, Counter(), total=4, config=newer, defaults=defaults)
    assert ended
    # The older run had switched the critic off; the newer one has it on.
    assert restored.changes == [
        *("critic.lr: None -> 0.1", "gone: 0 -> None", "list: None -> [1, 2]"),
        *("trainer.max_steps: 2 -> 4", "trainer.other: None -> 2"),
    ]
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]


def test_another_layout_continues_with_fresh_random_states_and_says_so(tmp_path):
    run(tmp_path, Counter(), total=2)
    random.seed(5)
    expected = random.random()
    random.seed(5)
    ended, restored = run(tmp_path, Counter(), total=2, layout="2 processes (tensor 2)")
    assert ended
    assert restored.saved_layout == "1 process"
    assert random.random() == expected
    assert run(tmp_path, Counter(), total=2)[1].saved_layout is None


def alter(path):
    """One bit of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def zero(path):
    """As large, but nothing: what a power cut leaves."""
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("harm", [alter, zero])
@pytest.mark.parametrize("file", ["state.json", "rng.pt", "manifest.json"])
def test_a_damaged_state_is_passed_over_for_the_one_before(tmp_path, uninterrupted, file, harm):
    random.seed(3)
    with pytest.raises(Killed):
        run(tmp_path, Counter({6: die}), async_save=False)
    harm(tmp_path / "run_state" / "step_000004" / file)
    said = io.StringIO()
    ended, restored = run(tmp_path, Counter(), said=said)
    assert (ended, restored.step) == (True, 2)
    assert "step_000004" in said.getvalue()
    assert lines(tmp_path) == uninterrupted


def test_where_no_state_can_be_used_nothing_is_touched(tmp_path):
    run(tmp_path, Counter(), total=4)
    for path in tmp_path.glob("run_state/*/state.json"):
        alter(path)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"no run state in .* can be read.*start_anew=true"):
        run(tmp_path, Counter(), total=4)
    assert snapshot(tmp_path) == before
    RunStateStore(tmp_path / "other" / "run_state").save(1, {"learner": {}, "layout": "1 process"})
    with pytest.raises(CheckpointError, match="no 'total'; another algorithm"):
        run(tmp_path / "other", Counter())


def test_steps_without_an_update_are_told_of_and_end_the_run(tmp_path):
    said = io.StringIO()
    with pytest.raises(NonFiniteError, match=r"steps 4 to 6: no update of the policy.*nonfinite"):
        run(tmp_path, Counter(stuck={1, 2, 4, 5, 6}), total=9, said=said)
    text = said.getvalue()
    assert "step 1: no update of the policy" in text
    assert "steps 1 to 2: no update" in text
    assert [line["step"] for line in lines(tmp_path)] == list(range(7))
    with pytest.raises(NonFiniteError):  # a short run that learned nothing
        run(tmp_path / "short", Counter(stuck={1, 2}), total=2)
    assert run(tmp_path / "better", Counter(stuck={2, 3}), total=3)[0]


def test_a_warning_of_a_step_is_said_where_a_validation_follows_too(tmp_path):
    said = io.StringIO()
    run(tmp_path, Counter(warns=(1, 3)), total=4, val=3, said=said)
    warnings = [line for line in said.getvalue().splitlines() if "odd" in line]
    assert warnings == ["step 1: number 1 is odd", "step 3: number 3 is odd"]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("SIGTERM", [signal.SIGTERM]),
        ("Ctrl-C", [signal.SIGINT, signal.SIGINT, signal.SIGTERM]),  # as launchers repeat it
    ],
)
def test_a_signal_saves_and_ends_and_the_run_continues(
    tmp_path, uninterrupted, capfd, name, numbers
):
    random.seed(3)
    before = [signal.getsignal(number) for number in numbers]
    learner = Counter({3: lambda: [os.kill(os.getpid(), number) for number in numbers]})
    said = io.StringIO()
    assert not run(tmp_path, learner, said=said)[0]
    assert [signal.getsignal(number) for number in numbers] == before
    assert learner.calls[-1] == ("validate", 3)  # due anyway
    assert f"stopped by {name} after step 3 of 6" in said.getvalue()
    assert capfd.readouterr().err.count("\n") == (name == "Ctrl-C")
    assert run(tmp_path, Counter())[1].step == 3
    assert lines(tmp_path) == uninterrupted


@pytest.mark.usefixtures("interrupts")
def test_a_second_ctrl_c_ends_at_once(tmp_path, monkeypatch):
    def interrupt_twice():
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(stopping, "_ECHO_S", 0.0)
        os.kill(os.getpid(), signal.SIGINT)

    learner = Counter({3: interrupt_twice})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, learner)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]


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
def test_a_run_tells_everything_in_order(tmp_path, uninterrupted, async_save):
    random.seed(3)
    recorder = Recorder()
    ended, _ = run(tmp_path / "told", Counter(), callbacks=told_by(recorder), async_save=async_save)
    assert ended
    assert lines(tmp_path / "told") == uninterrupted
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
def test_a_callback_stops_the_run_which_goes_on_later(tmp_path, uninterrupted, event, asked, ends):
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
    assert rewards == [line.get("train_rollouts/rewards") for line in uninterrupted]


def test_a_stop_of_before_is_forgotten():
    recorder = Recorder(at={"step_end": 1})
    callbacks = told_by(recorder)
    callbacks.notify("on_step_end", 1, {})
    assert callbacks.stop_reason == "enough at 1"
    callbacks.begin({}, None, 6)  # workers on Ray were started anew
    callbacks.notify("on_step_end", 2, {})
    assert callbacks.stop_reason is None
