"""Models that are only asked: generate, chat, evaluate; from every kind of model."""

import itertools
import json
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
from loaded import write_rows
from recipes import CONF, composed
from settings import parsed

from aligner.algorithms.ask.evaluate import evaluate
from aligner.algorithms.ask.generate import Chat, generate
from aligner.algorithms.ask.model import find_source, open_model
from aligner.algorithms.rs.trainer import train_rs
from aligner.checkpoint.convert import convert
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.config import EvaluateConfig, GenerateConfig, RSRunConfig, load_config, parse_config
from aligner.config.cli import check_overrides
from aligner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DataError,
    TokenizerError,
)
from aligner.examples.comparison import compare_runs
from aligner.examples.short_options import ASKING, as_overrides
from aligner.observe.estimates import majority_at_k, pass_at_k
from aligner.observe.metrics import read_metrics

pytestmark = pytest.mark.integration

ROWS = [{"prompt": f"{one}+{one + 1}=", "ground_truth": str(2 * one + 1)} for one in range(4)]
DIGIT = {"function": "aligner.rewards.regex_format:reward", "kwargs": {"pattern": "[0-9].*"}}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return str(write_rows(tmp_path_factory.mktemp("prompts") / "t.jsonl", ROWS))


@pytest.fixture(scope="module")
def models(tiny_nemo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    convert(tiny_nemo, folder / "hf")
    return {"nemo": str(tiny_nemo), "hf": str(folder / "hf")}


def answers(tmp_path, prompts, model, **changes):
    output = tmp_path / "answers.jsonl"
    sampling = {"max_length": 8, "samples_per_prompt": 2, **changes.pop("sampling", {})}
    given = {"model": {"restore_from_path": model}, "data": {"prompts": {"source": prompts}}}
    values = {**given, "sampling": sampling, "output": str(output), **changes}
    generate(parse_config(values, GenerateConfig))
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_directory_answers_as_its_nemo(tmp_path, prompts, models, backend):
    one, two = (
        answers(tmp_path, prompts, models[kind], policy={"backend": backend}, sampling=batches)
        for kind, batches in (("nemo", {}), ("hf", {"batch_size": 3}))
    )
    assert one == two
    assert [line["prompt"] for line in one[::2]] == [row["prompt"] for row in ROWS]
    assert [line["sample"] for line in one] == [0, 1] * 4
    assert one[0]["ground_truth"] == "1"  # a column of the row
    assert one[0]["response"] != one[1]["response"]
    assert all(1 <= line["tokens"] <= 8 for line in one)


def run_rs(folder, model, settings):
    """A run of rejection sampling, by default of two steps, in ``folder``."""
    rollouts = {"num_rollout_samples": 4, "num_rollouts_per_prompt": 2}
    values = {
        **{"model.restore_from_path": model, "model.optim.lr": 1e-2, "reward": DIGIT},
        **{"model.global_batch_size": 2, "model.micro_batch_size": 2},
        "model.rs": {**rollouts, "length_params": {"max_length": 6}},
        "exp_manager": {"explicit_log_dir": str(folder), "create_tensorboard_logger": False},
    }
    train_rs(parsed(values | settings, RSRunConfig))
    return folder


@pytest.mark.parametrize("peft", [{}, {"model.peft.peft_scheme": "lora"}], ids=["all", "lora"])
def test_a_runs_directory_is_its_newest_state(tmp_path, prompts, models, peft):
    run = run_rs(tmp_path / "run", models["nemo"], {"data.train.source": prompts, **peft})
    greedy = {"sampling": {"use_greedy": True, "samples_per_prompt": 1, "max_length": 12}}
    from_state = answers(tmp_path, prompts, str(run), **greedy)
    assert from_state == answers(tmp_path, prompts, str(run / "policy.nemo"), **greedy)
    assert from_state != answers(tmp_path, prompts, models["nemo"], **greedy)
    states = sorted((run / "run_state").iterdir())
    # A state that cannot be read is passed over, and nothing of the run is touched.
    (states[-1] / "state.json").write_text("{")
    before = sorted(path.name for path in (run / "run_state").rglob("*"))
    source = find_source(str(run))
    assert states[-1] not in {folder.parent for folder in source.states}
    assert sorted(path.name for path in (run / "run_state").rglob("*")) == before


def test_directories_that_hold_no_model(tmp_path):
    (tmp_path / "run_state").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="none was saved yet"):
        find_source(str(tmp_path))
    (tmp_path / "policy.nemo").write_bytes(b"")
    assert find_source(str(tmp_path)).path == str(tmp_path / "policy.nemo")
    (tmp_path / "policy.nemo").unlink()
    with ExitStack() as closing, pytest.raises(CheckpointError):
        open_model(asked(str(tmp_path / "nowhere")), closing)


def asked(model, **changes):
    values = {"model": {"restore_from_path": model}, "prompt": ("1+1=",), **changes}
    return parse_config(values, GenerateConfig)


def evaluated(model, output, **settings):
    """What an evaluation of a model writes: numbers of the sets, and the answers."""
    given = {"model": {"restore_from_path": str(model)}, "output": str(output), **settings}
    evaluate(parse_config(given, EvaluateConfig))
    numbers = json.loads((output / "evaluation.json").read_text())
    return numbers["sets"], [json.loads(line) for line in (output / "answers.jsonl").open()]


def test_an_evaluation_adds_up(tmp_path, prompts, models, capsys):
    data = {"prompts": {"source": prompts}, "sets": {"few": {"source": prompts, "limit": 1}}}
    sampling = {"samples_per_prompt": 4, "max_length": 4, "temperature": 0.7}
    settings = {"data": data, "sampling": sampling, "reward": DIGIT}
    sets, lines = evaluated(models["nemo"], tmp_path / "out", **settings)
    for name, count in (("prompts", 4), ("few", 1)):
        mine = [line for line in lines if line["set"] == name]
        groups = [mine[start : start + 4] for start in range(0, len(mine), 4)]
        assert len(groups) == count == sets[name]["prompts"]
        right = [[line["is_right"] for line in group] for group in groups]
        found = sets[name]["estimates"]
        assert found["mean@4"]["value"] == pytest.approx(sum(map(sum, right)) / 4 / count)
        assert found["accuracy"] == found["mean@4"]
        for k in (1, 2, 4):
            expected = sum(pass_at_k(row, k) for row in right) / count
            assert found[f"pass@{k}"]["value"] == pytest.approx(expected)
        voted = [
            majority_at_k(row, [line["answer"] for line in group], 4)
            for row, group in zip(right, groups, strict=True)
        ]
        assert found["maj@4"]["value"] == pytest.approx(sum(voted) / count)
        assert (found["mean@4"]["stderr"] is None) == (count == 1)
    assert 0 < sets["prompts"]["estimates"]["accuracy"]["value"] <= 1
    page = (tmp_path / "out" / "report.html").read_text()
    assert "pass@4" in page
    assert "few" in page
    assert "pass@4" in capsys.readouterr().out


def test_runs_and_evaluations_side_by_side(tmp_path, prompts, models, capsys):
    data = {"data.train.source": prompts, "data.validation.source": prompts}
    one = run_rs(tmp_path / "one", models["nemo"], data)
    two = run_rs(tmp_path / "two", models["nemo"], {**data, "seed": 7})
    settings = {"data": {"prompts": {"source": prompts}}, "sampling": {"max_length": 4}}
    reward = {"function": "aligner.examples.tasks.exact_number:reward"}
    evaluated(one, tmp_path / "asked", **settings, reward=reward)
    before = sorted(path for path in tmp_path.rglob("*"))
    report = compare_runs([one, two, tmp_path / "asked"], tmp_path / "out", "Mine & yours")
    numbers = json.loads((tmp_path / "out" / "comparison.json").read_text())
    for name, folder in (("one", one), ("two", two)):
        lines = read_metrics(folder / "metrics.jsonl")
        measured = [line.get("val_rollouts/accuracy") for line in lines]
        first, *_, last = [accuracy for accuracy in measured if accuracy is not None]
        found = numbers["runs"][name]["held_out"]
        assert list(found) == ["right answers"]  # the reward is the same number
        right = found["right answers"]
        assert (right["before"], right["after"]) == (first, last)
        assert numbers["runs"][name]["began_with"] == "tiny.nemo"
        assert numbers["runs"][name]["seconds"] > 0
    assert numbers["policies"]["asked"]["count"] == 4
    page, printed = report.read_text(), capsys.readouterr().out
    for text in ("one", "two", "asked"):
        assert text in page
        assert text in printed
    assert "Mine &amp; yours" in page
    left = [path for path in sorted(tmp_path.rglob("*")) if tmp_path / "out" not in path.parents]
    assert [path for path in left if path != tmp_path / "out"] == before
    with pytest.raises(DataError, match=r"contains neither metrics\.jsonl"):
        compare_runs([tmp_path], tmp_path / "out", "x")


def conversation(model, said):
    """What was written, and the prompts in tokens, of a chat in which the user says these lines."""
    written, read = [], Mock(side_effect=[*said, EOFError])
    config = asked(model, prompt=(), chat=True, sampling={"max_length": 8})
    with ExitStack() as closing:
        chat = Chat(config, open_model(config, closing), read, written.append)
        chat.run()
        return written, list(chat._messages)


def test_a_conversation_goes_on_and_is_forgotten(tiny_nemo):
    written, messages = conversation(str(tiny_nemo), ["hello", "", "/help", "again"])
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[2]["content"] == "again"
    text = "".join(written)
    assert "Ctrl-D ends" in text
    assert messages[1]["content"] in text
    assert len(written) > 8  # answers come in pieces
    same, again = conversation(str(tiny_nemo), ["hello", "/reset", "again"])
    assert again[0]["content"] == "again"
    assert "(forgotten)\n" in same
    # The same seed, the same words.
    assert conversation(str(tiny_nemo), ["hello"])[1] == messages[:2]
    # What does not fit.
    written, messages = conversation(str(tiny_nemo), ["x" * 5000])
    assert "/reset starts a new chat" in "".join(written)
    assert messages == []


def test_a_model_without_a_template_completes_text(tiny_nemo, tmp_path):
    with open_nemo(tiny_nemo) as nemo:
        files = dict(nemo.tokenizer_files)
        settings = json.loads(files["tokenizer_config.json"])
        del settings["chat_template"]
        files["tokenizer_config.json"] = json.dumps(settings).encode()
        save_nemo(tmp_path / "base.nemo", nemo.weights, nemo.architecture, files)
    with pytest.raises(TokenizerError, match="use --prompt TEXT"):
        conversation(str(tmp_path / "base.nemo"), ["hello"])


NASTY = [
    *["it's", 'say "hi"', "a,b:[c]{d}=e", "${x} ${oc.env:HOME}"],
    *["back\\slash\\", "two\nlines", "", "ä€"],
]


def test_prompts_arrive_as_they_were_typed():
    arguments = list(itertools.chain(*(("--prompt", text) for text in NASTY)))
    typed = ["--model", "dir with spaces/m.nemo", *arguments, "sampling.top_k=3", "--output=a,b"]
    kinds = {"flags": {"--chat": "chat=true"}, "repeated": {"--prompt": "prompt"}}
    overrides = check_overrides(as_overrides(typed, ASKING, **kinds), GenerateConfig, CONF)
    config = load_config(composed("gpt_generate", *overrides), GenerateConfig)
    assert config.prompt == tuple(NASTY)
    assert config.model.restore_from_path == "dir with spaces/m.nemo"
    assert config.output == "a,b"
    assert config.sampling.top_k == 3
    with pytest.raises(ConfigError, match="--model: its value is missing"):
        as_overrides(["--model"], ASKING)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ()}, "no prompts"),
        ({"chat": True}, "chat=true reads prompts"),
        ({"prompt": (), "chat": True, "trainer": {"devices": 2}}, "chat=true with 2 processes"),
        ({"sampling": {"use_greedy": True, "samples_per_prompt": 2}}, "samples_per_prompt=2"),
        ({"sampling": {"min_length": 300}}, r"sampling\.min_length=300 exceeds"),
        ({"sampling": {"max_new_tokens": 3}}, r"Did you mean sampling\.max_length"),
        ({"trainer": {"max_time": "00:00:01:00"}}, r"max_time=00:00:01:00 applies .* it to null"),
        ({"generation": {"async_rollouts": True}}, r"async_rollouts=true applies .* it to false"),
        ({"generation": {"in_flight": "abandon"}}, r"in_flight=abandon applies .* it to finish"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        asked("m.nemo", **changes)


def test_all_problems_of_an_evaluation_are_named():
    values = {"model": {"restore_from_path": "m.nemo"}, "reward": {"function": "m:f"}}
    values["generation"] = {"async_rollouts": True}
    with pytest.raises(ConfigError, match=r"(?s)- generation.async_rol.*- data.prompts.source"):
        parse_config(values, EvaluateConfig)
