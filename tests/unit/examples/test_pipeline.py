"""The order, the bookkeeping and the report of a pipeline; its scripts are stubs that only copy.

1. Every run takes the models that the pipeline says, and is checked before the first begins.
2. What is done is not done again; what failed or was stopped goes on; nothing is mixed.
3. The report's numbers are those of the runs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from loaded import write_rows
from reward_cases import soon
from test_observe_report import Document, sample

from aligner.errors import CheckpointNotFoundError, ConfigError, DataError, WorkerError
from aligner.examples.comparison import (
    ComparedPolicy,
    Comparison,
    Learned,
    Measure,
    render_comparison,
    wilson_interval,
)
from aligner.examples.pipeline_config import load_pipeline
from aligner.examples.pipeline_stages import length_accuracy, plan, run_pipeline
from aligner.examples.tasks.gsm8k import gsm8k_examples
from aligner.examples.tasks.gsm8k_solutions import solution_pairs

pytestmark = pytest.mark.integration

CONF = Path(__file__).parents[3] / "conf"
PIPELINE = """
title: Stubs & more
folder: results/stubs
start: start.nemo
evaluation:
  script: train_gpt_rs
  recipe: rs_tiny_cpu
  overrides: [trainer.rs.max_steps=0, exp_manager.save_nemo=false]
stages:
  - {name: sft, script: train_gpt_sft, recipe: sft_tiny_cpu}
  - name: reward
    script: train_gpt_reward
    recipe: reward_tiny_cpu
    overrides: [data.validation.arguments.size=10]
    takes: {model.restore_from_path: sft}
"""
ORDER = ["evaluate/start", "sft", "evaluate/sft", "reward"]
# Notes that it ran, does what a file named after it says, and leaves what such a script leaves.
STUB = """
import json, os, pathlib, shutil, signal, sys, time
settings = dict(one.split("=", 1) for one in sys.argv[3:])
folder = pathlib.Path(settings["exp_manager.explicit_log_dir"])
with open("ran", "a") as ran:
    ran.write("/".join(folder.parts[2:]) + "\\n")
(folder / "run_state").mkdir(parents=True, exist_ok=True)
order = pathlib.Path(folder.name + ".order")
what = order.read_text() if order.exists() else ""
if what == "fail":
    sys.exit(3)
if what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(60)
shares = {"evaluate/start": 0.25, "evaluate/sft": 0.75}
name = "/".join(folder.parts[2:])
lines = [{"step": 0, "val_optim/loss": 3.0}, {"step": 2, "val_optim/loss": 1.5}]
if name in shares:
    lines = [{"step": 0, "val_rollouts/accuracy": shares[name], "val_rollouts/num_samples": 64}]
if name == "reward":
    lines = [{"step": step, "val_optim/accuracy": 0.5 * step} for step in (0, 2)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
kind = "reward_model" if name == "reward" else "policy"
if name not in shares:
    shutil.copy(settings["model.restore_from_path"], folder / f"{kind}.nemo")
"""


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_nemo):
    """A folder with the pipeline, its start and its scripts, and the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stubs.yaml").write_text(PIPELINE)
    (tmp_path / "start.nemo").write_bytes(tiny_nemo.read_bytes())
    (tmp_path / "scripts").mkdir()
    for name in ("train_gpt_sft", "train_gpt_reward", "train_gpt_rs"):
        (tmp_path / "scripts" / f"{name}.py").write_text(STUB)
    return tmp_path


def run():
    return run_pipeline(Path("stubs.yaml"), CONF, Path("scripts"))


def ran():
    """The stages whose scripts were started since the last call, in order."""
    log = Path("ran")
    names = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return names


def test_every_run_takes_what_the_pipeline_says_and_needs_its_start(place):
    stages = plan(load_pipeline(Path("stubs.yaml")), CONF, Path("scripts"))
    assert [stage.name for stage in stages] == ORDER
    taken = [stage.config.model.restore_from_path for stage in stages]
    sft = "results/stubs/sft/policy.nemo"
    assert taken == ["start.nemo", "start.nemo", sft, sft]
    assert [stage.trained and stage.trained.name for stage in stages] == [
        *(None, "policy.nemo", None, "reward_model.nemo")
    ]
    assert stages[1].command.startswith("python examples/train_gpt_sft.py --config-name recipes/")
    Path("start.nemo").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"start=start\.nemo does not exist"):
        run()


def test_what_is_done_is_not_done_again_and_the_numbers_are_those_of_the_runs(place):
    report = run()
    assert ran() == ORDER
    assert not list(Path("results").rglob("run_state"))
    assert run() == report
    assert ran() == []
    assert "Stubs & more" in "".join(Document(report.read_text()).text)
    numbers = json.loads(Path("results/stubs/comparison.json").read_text())
    policy = numbers["policies"]["sft"]
    assert (policy["accuracy"], policy["began_with"]) == (0.75, "start")
    assert policy["interval_95"] == list(wilson_interval(0.75, 64))
    held_out = numbers["runs"]["reward"]["held_out"]
    interval = list(wilson_interval(1.0, 10))
    ranked = {"before": 0.0, "after": 1.0, "count": 10, "interval_95": interval}
    assert held_out["pairs ranked right"] == ranked
    assert 0 <= held_out["… by length alone"]["after"] <= 1
    assert numbers["runs"]["sft"]["held_out"]["loss"]["after"] == 1.5


def test_what_failed_is_run_again_and_nothing_before_it(place):
    Path("results/stubs/sft").mkdir(parents=True)
    Path("results/stubs/sft/metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="contains another run"):
        run()
    Path("results/stubs/sft/metrics.jsonl").unlink()
    Path("reward.order").write_text("fail")
    with pytest.raises(WorkerError, match="stage reward ended with status 3"):
        run()
    assert "1 runs are missing" in Path("results/stubs/report.html").read_text()
    ran()
    Path("reward.order").unlink()
    run()
    assert ran() == ["reward"]


def test_sigterm_is_for_the_stage_which_saves_and_is_continued(place):
    Path("sft.order").write_text("wait")
    code = f"from test_pipeline import *; CONF = Path({str(CONF)!r}); run()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        log = Path("ran")
        soon(lambda: process.poll() or (log.exists() and "sft" in log.read_text().split()), 120.0)
        assert process.poll() is None, process.communicate()[1]
        assert "sft" in log.read_text().split()
        time.sleep(0.5)  # the stub listens for the signal
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "stage sft was stopped. The same command continues" in errors
    ran()
    Path("sft.order").unlink()
    run()
    assert ran() == ORDER[1:]


def test_a_stage_of_another_model_or_configuration_is_never_gone_on_with(place):
    run()
    ran()
    Path("stubs.yaml").write_text(
        PIPELINE.replace("sft_tiny_cpu}", "sft_tiny_cpu, overrides: [seed=7]}")
    )
    with pytest.raises(ConfigError, match=r"seed: 1 -> 7.*rm -r results/stubs/sft results/stubs/r"):
        run()
    Path("stubs.yaml").write_text(PIPELINE)
    os.utime("results/stubs/sft/policy.nemo")  # as if it had been made anew
    with pytest.raises(ConfigError, match=r"stage reward.*sft/policy.nemo.*-> "):
        run()
    assert ran() == ["evaluate/sft"]  # which only measures


def test_an_option_that_came_with_an_upgrade_makes_nothing_stale(place):
    run()
    ran()
    for record in Path("results").rglob("stage.json"):
        older = json.loads(record.read_text())
        del older["made_of"]["model"]["micro_batch_size"]
        del older["made_of"]["cluster"]
        record.write_text(json.dumps(older))
    run()
    assert ran() == []
    record = Path("results/stubs/sft/stage.json")
    older = json.loads(record.read_text())
    older["made_of"]["data"]["train"]["arguments"].pop("size")  # these are the user's own
    record.write_text(json.dumps(older))
    with pytest.raises(ConfigError, match=r"data\.train\.arguments\.size: None -> "):
        run()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: reward", "name: sft", "stages.1..name: 'sft' must consist"),
        ("path: sft", "path: ppo", "'ppo' is not an earlier stage. Use one of start, sft"),
        ("script: train_gpt_reward", "script: train_gpt_rewards", "Did you mean train_gpt_reward"),
        ("recipe: reward_tiny_cpu", "recipe: no_such", "recipe no_such"),
        ("data.validation.arguments.size=10", "sed=1", "recipe reward_tiny_cpu with sed=1"),
        ("data.validation.arguments.size=10", "dry_run=true", "saves no model for later stages"),
        ("size=10", "size=[", "expected ',' or ']'"),
        ("start: start.nemo", "begin: start.nemo", "begin: unknown key"),
        (", exp_manager.save_nemo=false", "", "an evaluation saves no model"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_run(place, old, new, message):
    Path("stubs.yaml").write_text(PIPELINE.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        run()
    assert ran() == []


@pytest.mark.parametrize("name", ["arithmetic", "gsm8k", "agent"])
def test_the_shipped_pipelines_compose(name, monkeypatch):
    monkeypatch.setenv("SEED", "3")
    stages = plan(load_pipeline(CONF / "pipelines" / f"{name}.yaml"), CONF, Path("examples"))
    held_out = {
        json.dumps(stage.config.data.validation.arguments, sort_keys=True)
        for stage in stages
        if stage.trained is None
    }
    assert len(held_out) <= 1  # all are asked the same
    assert all(stage.config.exp_manager.explicit_log_dir.startswith("results/") for stage in stages)
    if name == "agent":  # every seed has a folder of its own
        assert {stage.folder.parts[2] for stage in stages} == {"seed3"}
        assert {stage.config.seed for stage in stages if stage.trained is not None} == {3}


# The page -------------------------------------------------------------------------------------


def test_the_page_is_balanced_safe_and_shows_changes_both_ways():
    answers = [sample(0, response="</td><script>alert(1)</script>"), sample(0, prompt="2+2=")]
    policies = [
        ComparedPolicy("start", None, 0.25, 64, answers),
        ComparedPolicy("worse", "start", 0.125, 64, answers[:1]),
    ]
    metrics = [{"step": 0, "val_optim/loss": 2.0}, {"step": 4, "val_optim/loss": 1.0}]
    run = Learned(
        *("worse", "start", metrics),
        [Measure("loss", 2.0, 1.0, None, -1), Measure("by rule", None, 0.5, 10)],
        *(90.0, "python x.py", {"model": "m.nemo"}),
    )
    document = Document(render_comparison(Comparison("A & B", policies, [run], {}, missing=3)))
    text = "".join(document.text)
    assert "3 runs are missing" in text
    assert "0.125 [0.065" in text
    assert "−0.125" in text
    assert "alert(1)" in text
    assert document.tags.count("script") == 1
    moods = [value for name, value in document.attributes if name == "class" and "number" in value]
    assert "number down" in moods  # accuracy fell
    assert "number up" in moods  # the loss fell
    assert text.count("2+2=") == 0  # not all were asked


def test_intervals_by_hand():
    """Newcombe (1998): 81 of 263 is 0.2553 to 0.3662; 0 of 20 is 0 to 0.1611."""
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    with pytest.raises(ValueError):
        wilson_interval(0.5, 0)


def test_length_alone_follows_the_rule_of_the_training_pairs():
    def pairs(*lengths):
        row = SimpleNamespace
        return [row(chosen=row(length=a), rejected=row(length=b)) for a, b in lengths]

    held_out = pairs((9, 1), (1, 1), (1, 2), (7, 3))
    assert length_accuracy(pairs((5, 3), (4, 2), (1, 2)), held_out) == 2.5 / 4
    assert length_accuracy(pairs((3, 5), (2, 4), (2, 1)), held_out) == 1.5 / 4


# GSM8K ----------------------------------------------------------------------------------------


def solution(text, right):
    return {"is_correct": right, "solution": text}


def test_right_solutions_meet_wrong_ones_of_the_same_problem(tmp_path):
    rows = [
        {"question": f"q{n}", "ground_truth": "g", "a": solution("r1", True)}
        | {"b": solution("w1", False), "c": solution("w2", n % 2 == 0), "d": solution("r1", True)}
        for n in range(40)
    ]
    rows.append({"question": "all right", "a": solution("x", True), "b": solution("y", True)})
    solutions = write_rows(tmp_path / "solutions.jsonl", rows)
    sets = {
        split: list(solution_pairs(solutions, split, pairs_per_problem=9))
        for split in ("train", "validation")
    }
    asked = {split: {row["prompt"] for row in rows} for split, rows in sets.items()}
    assert not asked["train"] & asked["validation"]
    assert asked["train"] | asked["validation"] == {f"q{number}\n" for number in range(40)}
    assert 8 <= len(asked["validation"]) <= 24
    for row in [*sets["train"], *sets["validation"]]:
        even = int(row["prompt"][1:]) % 2 == 0
        assert row["chosen"] in (("r1", "w2") if even else ("r1",))
        assert row["rejected"] in (("w1",) if even else ("w1", "w2"))
    assert sum(map(len, sets.values())) == 80  # two pairs each, the doubled solution counted once
    again = list(solution_pairs(solutions, "train"))
    assert again == list(solution_pairs(solutions, "train"))
    assert len(again) == len(asked["train"])


def test_rows_without_solutions_are_refused_by_their_place(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "q", "a": {"solution": "s"}}\n')
    with pytest.raises(DataError, match=r"x\.jsonl, line 1: needs a question and solutions"):
        list(solution_pairs(path))
    for wrong in ({"split": "test"}, {"validation_fraction": 1.0}, {"pairs_per_problem": 0}):
        with pytest.raises(ConfigError):
            list(solution_pairs(path, **wrong))


def test_worked_examples_end_in_the_mark(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [{"question": "Two?", "answer": "1+1 = 2\n#### 2"}])
    assert list(gsm8k_examples(path, suffix="\n", mark="A:")) == [
        {"prompt": "Two?\n", "response": "1+1 = 2\nA: 2"}
    ]
