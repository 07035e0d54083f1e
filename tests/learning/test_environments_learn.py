"""Runs over conversations: to their end by every algorithm, on two processes, and learning."""

import json
import re
from pathlib import Path

import pytest
import recipes
import yaml
from ranks import run_ranks
from recipes import ROOT, near, numbers, settings
from variants import extended_except

from aligner.examples.tasks.games import guessing_games
from aligner.observe.metrics import read_metrics

RECIPE = "ppo_tiny_guessing_cpu"
# The same game for scripts that have no recipe of it.
GAME = [
    *("reward=environment", "environment.factory=aligner.examples.tasks.games:GuessingGame"),
    *("+environment.kwargs={high: 3, guesses: 3}", "environment.max_tokens=128"),
    *("data.train.source=aligner.examples.tasks.games:guessing_games", "environment.concurrency=4"),
]


CRITIC = [
    *("critic.global_batch_size=8", "critic.micro_batch_size=4", "environment.concurrency=4"),
    *("data.validation=null", "trainer.ppo.val_check_interval=0"),
]


def short(section, samples=8):
    return [
        *(f"trainer.{section}.max_steps=2", f"model.{section}.num_rollout_samples={samples}"),
        *("model.global_batch_size=8", "model.micro_batch_size=4"),
        f"model.{section}.length_params.max_length=2",
    ]


def run(folder, nemo, *overrides, script=RECIPE):
    return recipes.run(folder, nemo, script, *overrides)


def run_on_two(folder, nemo, *overrides):
    name = ("--config-name", f"recipes/{RECIPE}")
    arguments = [*name, *settings(folder, nemo), *overrides, "trainer.devices=2"]
    run_ranks(ROOT / "examples" / "train_gpt_ppo.py", 2, arguments, 240)


def samples_of(folder):
    return [json.loads(text) for text in (folder / "samples.jsonl").read_text().splitlines()]


def test_the_recipe_runs_to_its_end(tmp_path, tiny_nemo, capsys):
    small = ["critic.global_batch_size=8", "critic.micro_batch_size=4"]
    lines = run(
        tmp_path,
        tiny_nemo,
        *short("ppo"),
        *small,
        "data.validation.arguments.size=8",
        "data.ground_truth_column=secret",
        "environment.concurrency=4",
    )
    assert lines[0]["val_rollouts/turns"] > 1
    for line in lines[1:]:
        names = ("done", "max_turns", "max_tokens")
        assert sum(line[f"train_rollouts/ended_{name}"] for name in names) == pytest.approx(1)
        # Over holes too, sampler and trainer agree on every log-prob.
        assert line["sampler/logprob_gap_max"] < 1e-4
        assert line["train_rollouts/failed_env_error"] == 0
    samples = samples_of(tmp_path)
    first = samples[0]
    assert len(first["turns"]) == first["response"].count("[+") > 1
    assert first["turns"][0]["reward"] is not None
    report = (tmp_path / "report.html").read_text()
    assert "<b>user</b> read, masked" in report
    held_out = [sample["ground_truth"] for sample in samples if sample["split"] == "val"]
    secrets = [str(row["secret"]) for row in guessing_games("validation", 4, high=3)]
    assert held_out == secrets * 2  # four are shown of each validation
    assert {sample["ground_truth"] for sample in samples} <= {"1", "2", "3"}
    assert f'<div class="long">{secrets[0]}</div>' in report
    assert re.search(r"truth +reward +tokens", capsys.readouterr().out)


@pytest.fixture
def forking(tmp_path):
    """A template that shows the last two messages only: every further turn is another sequence."""
    template = tmp_path / "last_two.jinja"
    template.write_text(
        "{% for m in messages[-2:] %}{{ '<|im_start|>' + m.role + '\\n' + m.content + "
        "'<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    return [f"environment.chat_template={template}", "environment.max_tokens=250"]


# Script or recipe, and options.
FORKED = {
    "a critic": (RECIPE, [*short("ppo"), *CRITIC]),
    "a critic and adapters": (RECIPE, [*short("ppo"), *CRITIC, "model.peft.peft_scheme=lora"]),
    "turns compared, packed": (
        "gpt_reinforce",
        [
            *(*GAME, *short("ppo"), "model.sequence_packing.enabled=true"),
            *("trainer.ppo.advantage.estimator=grpo", "trainer.ppo.advantage.credit=turn"),
        ],
    ),
    "the best": (
        "gpt_rs",
        [
            *(*GAME, *short("rs", 16)),
            *("model.rs.num_rollouts_per_prompt=4", "model.global_batch_size=4"),
        ],
    ),
}


@pytest.mark.parametrize("case", extended_except(FORKED.keys() - {"a critic and adapters"}, FORKED))
def test_conversations_that_fork_are_learned(case, tmp_path, tiny_nemo, forking):
    script, options = FORKED[case]
    lines = run(tmp_path / "run", tiny_nemo, *options, *forking, script=script)
    assert len(lines) == 3  # before the first step, and two
    assert lines[-1]["train_rollouts/forks"] > 0
    for line in lines[1:]:
        assert line["train_rollouts/ended_done"] == 1
        if script == "gpt_rs":
            assert line["train_rollouts/kept_rewards"] >= line["train_rollouts/rewards"]
        else:
            assert line["sampler/logprob_gap_max"] < 1e-4
    if script == RECIPE:
        for line in lines[1:]:
            assert line["train_rollouts/forks"] == 8 * (line["train_rollouts/turns"] - 1) > 0
        assert lines[-1]["train_optim/grad_norm"] > 0  # the first step may earn nothing
        assert (tmp_path / "run" / "policy.nemo").exists()


def test_two_processes_have_the_same_conversations(tmp_path, tiny_nemo):
    """Three conversations at a time on one side, eight on the other."""
    options = [*short("ppo"), *CRITIC]
    one, two = tmp_path / "one", tmp_path / "two"
    run(one, tiny_nemo, *options, "environment.concurrency=3")
    run_on_two(two, tiny_nemo, *options, "environment.concurrency=8")
    first = [sample for sample in samples_of(one) if sample["step"] == 1]
    assert first == [sample for sample in samples_of(two) if sample["step"] == 1]
    assert len(first) > 1


# Over the same conversations, which fork, each of these makes its passes in another way.
WAYS = {
    "tensor": ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"],
    "pipeline": ["model.pipeline_model_parallel_size=2"],
    "context": ["model.context_parallel_size=2"],
    "packed": ["model.sequence_packing.enabled=true", "model.sequence_packing.train_mb_tokens=256"],
    "dynamic": [
        *("model.dynamic_batching.enabled=true", "model.dynamic_batching.train_mb_tokens=256")
    ],
    "dtensor": ["policy.backend=dtensor"],
}


@pytest.mark.extended
@pytest.mark.parametrize("way", WAYS)
def test_another_way_has_the_same_numbers_of_forked_conversations(
    tmp_path, tiny_nemo, forking, way
):
    options = [*short("ppo"), *CRITIC, *forking]
    one, other = tmp_path / "one", tmp_path / "other"
    run(one, tiny_nemo, *options)
    is_layout = way in ("tensor", "pipeline", "context")
    (run_on_two if is_layout else run)(other, tiny_nemo, *options, *WAYS[way])
    ours, theirs = ([s for s in samples_of(folder) if s["step"] == 1] for folder in (one, other))
    assert ours == theirs
    first, second = (numbers(folder)[1] for folder in (one, other))
    assert first["train_rollouts/forks"] > 0
    assert {name: second[name] for name in first} == near(first)


@pytest.mark.extended
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_game_is_learned(tmp_path, tiny_nemo, seed):
    lines = run(tmp_path, tiny_nemo, f"seed={seed}")
    assert lines[0]["val_rollouts/rewards"] < 0.15
    assert lines[-1]["val_rollouts/rewards"] > 0.4


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_the_agent_s_pipeline_runs_to_its_end(tmp_path, tiny_nemo, monkeypatch):
    """The recipes of `make agent` with a tiny model: what is shorter is what is set here."""
    from aligner.examples.pipeline_stages import run_pipeline

    monkeypatch.chdir(tmp_path)
    values = yaml.safe_load((ROOT / "conf" / "pipelines" / "agent.yaml").read_text())
    values["start"] = str(tiny_nemo)
    values["evaluation"]["overrides"] = ["data.validation.arguments.size=4"]
    few = ["data.train.arguments.size=16", "data.validation.arguments.size=4"]
    shorter = {
        "sft": ["trainer.sft.max_steps=2", "model.global_batch_size=8", "model.micro_batch_size=8"],
        "ppo": [
            *("trainer.ppo.max_steps=2", "model.ppo.num_rollout_samples=8"),
            *("model.global_batch_size=8", "model.micro_batch_size=8"),
            *("critic.global_batch_size=8", "critic.micro_batch_size=8"),
        ],
    }
    for stage in values["stages"]:
        stage["overrides"] += [*few, *shorter[stage["name"]]]
    Path("agent.yaml").write_text(yaml.safe_dump(values))
    run_pipeline(Path("agent.yaml"), ROOT / "conf", ROOT / "examples")

    folder = Path("results/pipeline_agent/seed1")
    numbers = json.loads((folder / "comparison.json").read_text())
    assert list(numbers["policies"]) == ["start", "sft", "ppo"]
    learned = read_metrics(folder / "sft" / "metrics.jsonl")
    assert learned[-1]["val_optim/loss"] < learned[0]["val_optim/loss"]
    lines = read_metrics(folder / "ppo" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["sampler/logprob_gap_max"] < 1e-4 for line in lines[1:])
    (first, *_) = samples_of(folder / "ppo")
    assert "call calculator " in first["prompt"]
    assert first["turns"]
