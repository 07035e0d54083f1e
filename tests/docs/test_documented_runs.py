"""Every command of the documentation, typed as it stands, does what its page says (`-m extended`).

Models, data and reward functions of the reader are the tiny ones of conftest.py under the names
that pages give them; nothing else of a command is changed, unless ``SHORTER`` says so.
"""

import json
import re
import shlex
import signal
import subprocess
import sys

import pytest
from conftest import environment, shell
from documented import CONF, ROOT, blocks, commands, tables
from servers import bound_port, started
from test_conf import ROOTS
from test_docs_commands import composed_of, filled, kind_of
from test_docs_tables import code

from aligner.config.cli import check_overrides

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1800)]
# Commands that are not run, by a pattern of their text, and why. They still compose.
NOT_RUN = {
    r"--nproc-per-node 8|trainer\.devices=8": "eight GPUs; tests/distributed has four",
    r"RAY_ADDRESS=": "tests/ray starts two nodes with these words and trains on them",
    r"generation\.backend=vllm": "`make test-vllm`: it needs vLLM's environment",
    r"_environments\.(gymnasium|mcp|openenv|skyrl_gym|verifiers)\w*:": "tests/adapters plays it",
    r"python -m benchmarks\.": "minutes to an hour; benchmarks/LOG.md has each reading",
    r"examples/pipeline\.py": "tests/learning/test_pipeline_learns.py runs one of tiny stages",
    r"(aligner |examples/)compare": "wants the directories of several runs; tests/unit has its own",
    r"^(python examples/(generate|evaluate)\.py( --chat)?|aligner (generate|chat|evaluate))$": (
        "names a command in a sentence; its arguments stand in a block"
    ),
    r"serve_reward_model\.py|reward=server": "test_the_server_of_the_page, below",
    r"(aligner |examples/)serve(\.py)?( |$)": "tests/unit/serving/test_serving_page.py",
}
# Recipes whose numbers are those of the pretrained model: a few steps of the tiny one show the way.
# The tiny model has 256 positions, for prompt and response together.
SHORTER = {
    r"(aligner|examples/)[ ]?(generate|chat|evaluate)\b": "sampling.max_length=64",
    r"plan\.architecture=": "plan.prompt_length=64 model.ppo.length_params.max_length=64",
    r"distill\.length_params\.max_length=256": "model.distill.length_params.max_length=64",
    r"recipes/(ppo|grpo)\w*_smollm2": "trainer.ppo.max_steps=2",
    r"command='python my_agent.py'": "trainer.ppo.max_steps=2 model.ppo.num_rollout_samples=16"
    " model.global_batch_size=16 critic.global_batch_size=16",
    r"recipes/ppo_reward_model_smollm2": "trainer.ppo.max_steps=2",
    r"recipes/rs_smollm2": "trainer.rs.max_steps=2",
    r"recipes/sft_smollm2": "trainer.sft.max_steps=2",
    r"recipes/dpo_smollm2": "trainer.dpo.max_steps=2",
    r"recipes/reward_smollm2": "trainer.reward_model.max_steps=2",
}
# Kinds of commands that are not run at all.
NOT_TYPED = {
    "make": "sets up environments; what it types is composed in tests/test_docs_commands.py",
    "foreign": "see FOREIGN there",
}


def left_out(command):
    return next((why for text, why in NOT_RUN.items() if re.search(text, command.text)), None)


def to_run(kind):
    """Commands of a kind, each text once."""
    found = {}
    for command in commands():
        if kind_of(command) == kind and not left_out(command):
            found.setdefault(" ".join(command.words), command)
    return {f"{one.place} {one.text[:70]}": one for one in found.values()}


def test_the_table_of_a_plan(tmp_path):
    """docs/plan.md prints the output of its first command, for the shape of Qwen2.5-1.5B."""
    shape = {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960}
    shape |= {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
    shape |= {"vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True}
    shape |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}
    (tmp_path / "Qwen2.5-1.5B-Instruct").mkdir()
    (tmp_path / "Qwen2.5-1.5B-Instruct" / "config.json").write_text(json.dumps(shape))
    page = (ROOT / "docs/plan.md").read_text()
    words = next(each.words for each in commands() if each.place.startswith("docs/plan.md"))
    command = [
        sys.executable,
        *(word.replace("examples/", f"{ROOT}/examples/") for word in words[1:]),
    ]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    table = re.search(r"```text\n(role .*?)```", page, re.DOTALL)[1]
    printed = [line.split() for line in output.stdout.splitlines()]
    assert [row for row in map(str.split, table.splitlines()) if row not in printed] == []


def test_every_reason_has_a_command():
    kinds = {"train", "script", "module", "aligner"}
    assert {kind_of(command) for command in commands()} <= kinds | set(NOT_TYPED)
    texts = [command.text for command in commands()]
    for pattern in [*NOT_RUN, *SHORTER]:
        assert any(re.search(pattern, text) for text in texts), pattern
    for why in [*NOT_RUN.values(), *NOT_TYPED.values()]:
        named = re.findall(r"tests/[\w/.]*\w", why)
        assert [name for name in named if not (ROOT / name).exists()] == []


def typed(command):
    """The command, its dots replaced by what it cannot do without."""
    text = command.text
    added = [value for pattern, value in SHORTER.items() if re.search(pattern, text)]
    if command.is_open:
        _, arguments = filled(command)
        given = set(command.arguments)
        needed = [named(one) for one in arguments if one not in given]
        text = re.sub(r"(?<!\S)(\.\.\.|…)(?!\S)", shlex.join(needed) or " ", text, count=1)
        if command.words[0] in ("...", "…"):
            text = f"python examples/train_gpt_ppo.py {text}"
    return " ".join([text.strip(), *added])


def named(override):
    """What a test composes with, under the names of the workplace."""
    key, _, value = override.partition("=")
    files = {"m.nemo": "my_model.nemo", "t.nemo": "large.nemo"}
    files["a.b:reward"] = "my_rewards.py:reward"
    return f"{key}={files.get(value, value)}"


def settings(command):
    name, arguments = filled(command)
    return composed_of(name, tuple(check_overrides(arguments, ROOTS[name][0], CONF)))


def history(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def first_and_last(lines, name):
    values = [line[name] for line in lines if name in line]
    return values[0], values[-1]


@pytest.mark.parametrize("command", to_run("train").values(), ids=to_run("train"))
def test_training_commands_run(command, workplace):
    folder = workplace()
    done = shell(folder, typed(command))
    assert done.returncode == 0, f"{typed(command)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    if {"--help", "--cfg"} & set(command.words):
        assert "restore_from_path" in done.stdout
        return
    config = settings(command)
    run = folder / config.exp_manager.explicit_log_dir
    if config.dry_run:
        assert "nothing was saved" in done.stdout
        assert not run.exists()
        return
    lines = history(run)
    assert lines
    assert (run / "report.html").stat().st_size > 10_000
    model = "reward_model.nemo" if command.script == "train_gpt_reward" else "policy.nemo"
    assert (run / model).exists() == config.exp_manager.save_nemo
    if config.model.peft.peft_scheme == "lora":
        assert (run / "policy.lora.safetensors").exists()
    for promise, cells in promises(command):
        held(promise, cells, lines)


def promises(command):
    """(metric, cell) of every row that is what this command comes to."""
    return [
        (table.header[1:], row[1:])
        for table in tables()
        if table.header[0] == "command"
        for row in table.rows
        if [shlex.split(text) for text in code(row[0])][:1] == [command.words]
    ]


# Runs of one machine differ from another's in rounding, which learning amplifies.
ROOM, SHARE = 0.06, 0.15


def held(headers, row, lines):
    """The numbers of a row: `before → after` below a metric, or accuracy before and after."""
    if headers == ("before", "after"):
        pairs = [("val_rollouts/accuracy", row)]
    else:
        pairs = []
        for header, cell in zip(headers, row, strict=True):
            name = (code(header) or [header])[0]
            name = name if "/" in name else f"val_optim/{name}"
            arrows = re.match(r"(-?[\d.]+) → (-?[\d.]+)", cell)
            if arrows:
                pairs.append((name, arrows.groups()))
    for name, (before, after) in pairs:
        for said, true in zip((before, after), first_and_last(lines, name), strict=True):
            assert true == pytest.approx(float(said), abs=ROOM, rel=SHARE), (name, said, true)
    assert pairs or headers == ("result",), headers


@pytest.mark.parametrize(
    "command",
    [*to_run("script").values(), *to_run("module").values()],
    ids=[*to_run("script"), *to_run("module")],
)
def test_scripts_write_what_they_are_told_to(command, workplace):
    words = [word.strip("[]") for word in command.words]
    output = words[words.index("--output") + 1] if "--output" in words else None
    folder = workplace(*filter(None, [output]))
    if "my_model.gguf" in words and not (folder / "my_model.gguf").exists():
        pytest.skip("make models/smollm2-135m-instruct.nemo installs a GGUF file; not done here")
    added = [value for pattern, value in SHORTER.items() if re.search(pattern, command.text)]
    text = " ".join([command.text.replace("[", "").replace("]", ""), *added])
    done = shell(folder, text, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{text}\n{done.stderr[-3000:]}"
    if command.script == "evaluate":
        output = "results/evaluation/evaluation.json"
    if output is None:
        assert done.stdout.strip()
        return
    made = folder / output
    assert made.exists()
    assert made.is_file() or list(made.iterdir())


def test_the_aligner_commands_are_listed(workplace):
    folder = workplace()
    for command in (each for each in commands() if kind_of(each) == "aligner"):
        done = shell(folder, command.text)
        assert done.returncode == 0, done.stderr
        assert "train-ppo" in done.stdout


def test_the_server_of_the_page(workplace):
    """Started, asked by a run, refused without the token, and ended by SIGTERM with status 0."""
    page = [command for command in commands() if command.page == "docs/reward.md"]
    server = next(command.text for command in page if "--token-file" in command.text)
    client = typed(next(command for command in page if "reward=server" in command.text))
    folder, ready = workplace(), r"reward server ready at (\S+)"
    with bound_port() as port:
        command = ["bash", "-c", f"exec {server.replace('5555', str(port))}"]
        client = client.replace("5555", str(port)).replace("HOST", "127.0.0.1")
        with started(command, ready, cwd=folder, env=environment()) as (_, process):
            done = shell(folder, client)
            assert done.returncode == 0, done.stderr[-3000:]
            (folder / "reward.token").unlink()
            (folder / "reward.token").write_text("another")
            refused = shell(folder, f"{client} exp_manager.explicit_log_dir=results/refused")
            assert refused.returncode == 2, refused.stderr
            assert "401" in refused.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


# Blocks that show a form and run nothing, by their first line.
SHOWN = (
    *("def reward(prompts, responses", "# my_data.py", "# my_rewards.py", "# my_game.py"),
    *("# my_agent.py", "# my_taskset.py"),
    *("# my_counter.py", "# my_server.py", "# my_nemo_env.py", "# my_vf_env.py"),
)
ASKS_A_SERVER = "import httpx"
PYTHON = [block for block in blocks() if block.language == "python"]


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.page}:{block.line}")
def test_python_of_the_pages_runs(block, workplace):
    if block.text.startswith(SHOWN):
        pytest.skip("a file of the reader's: training commands here use it, or tests/adapters")
    if block.text.startswith(ASKS_A_SERVER):
        pytest.skip("tests/unit/serving/test_serving_page.py runs it beside its server")
    done = subprocess.run(
        ["python", "-c", block.text],
        cwd=(folder := workplace()),
        env=environment(PYTHONPATH=f"{environment()['PYTHONPATH']}:{folder}"),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_files_of_a_run_are_those_of_the_table(workplace):
    """docs/ppo.md, README's command: every file that is not said to be absent is there."""
    command = next(
        one for one in commands() if one.page == "README.md" and "my_rewards" in one.text
    )
    folder = workplace()
    done = shell(folder, command.text)
    assert done.returncode == 0, done.stderr[-3000:]
    run = folder / settings(command).exp_manager.explicit_log_dir
    table = next(one for one in tables() if one.header == ("file", "what it holds"))
    for names, said in table.rows:
        if "absent" in said or "Held while" in said:
            continue
        for name in code(names):
            assert list(run.glob(name.rstrip("/").replace("NNNNNN", "*"))), name
