"""Every command and every table of the documentation holds: composed here, run with `-m extended`.

A new page is read as it is. Where a test below fails on something new, its message says where that
is classified. What a command must come to is in tests/docs/test_documented_runs.py.
"""

import argparse
import json
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache

import pytest
from documented import CONF, ROOT, blocks, commands, shell_lines, spans
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from recipes import composed
from test_conf import ROOTS
from test_layering import modules

from aligner.config import load_config
from aligner.config.cli import check_key, check_overrides
from aligner.config.parse import build, field_types, section_in
from aligner.errors import AlignerError

# Programs that are no part of the project: why a test does not type what the page says.
FOREIGN = {
    "pip": "installs, over the network; the environment of the tests was made by `make setup`",
    "source": "the shell's",
    "docker": "needs a daemon, and a network for the base image",
    "sbatch": "needs Slurm; tests/test_slurm.py runs the job files with its programs stood in for",
    "ray": "tests/ray starts and ends clusters with the same words",
    "head": "the system's",
    "curl": "tests/unit/serving/test_serving_page.py types it beside its server",
}
ALIGNER_LIST = ("aligner --help", "aligner")
MODULES = ("benchmarks", "aligner", "campaigns", "docs")  # packages whose commands are begun


def kind_of(command):
    words = command.words
    if command.script is not None:
        return "train" if command.script.startswith("train_gpt") else "script"
    if words[0] == "make":
        return "make"
    if words[0] in FOREIGN:
        return "foreign"
    if words[1:2] == ["-m"] and words[2].split(".")[0] in MODULES:
        return "module"
    if command.text in ALIGNER_LIST:
        return "aligner"
    return None


def each_of(*kinds):
    """Run a test with each command of these kinds."""
    found = [command for kind in kinds for command in commands() if kind_of(command) == kind]
    ids = [f"{command.place} {command.text[:60]}" for command in found]
    return pytest.mark.parametrize("command", found, ids=ids)


def check(problems, advice):
    assert problems == [], "\n".join([*map(str, problems), advice])


def test_every_command_is_of_a_known_kind():
    assert len(commands()) > 60
    check(
        [f"{one.place}: {one.text}" for one in commands() if kind_of(one) is None],
        "give it a branch in kind_of, or its program a reason in FOREIGN",
    )


@cache
def composed_of(name, overrides):
    root, _ = ROOTS[name]
    recipe = (recipe_of(overrides) or name).removeprefix("recipes/")
    return load_config(composed(recipe, *plain(overrides)), root)


def recipe_of(arguments):
    given = list(arguments)
    return given[given.index("--config-name") + 1] if "--config-name" in given else None


def plain(arguments):
    """Overrides alone, without hydra's options."""
    found, skip = [], False
    for argument in arguments:
        if not (skip or argument.startswith("-")):
            found.append(argument)
        skip = argument in ("--config-name", "--cfg")
    return found


def filled(command):
    """A training command's overrides; where the page has dots, with what it cannot do without."""
    name = command.script.removeprefix("train_")
    arguments = command.arguments
    if command.is_open or {"--help", "--cfg"} & set(arguments):
        given = {argument.split("=")[0].lstrip("+~") for argument in arguments}
        needed = [] if recipe_of(arguments) else ROOTS[name][1]
        if given & {"reward"}:  # another kind of reward
            needed = [one for one in needed if not one.startswith("reward.function")]
        arguments = [*[one for one in needed if one.split("=")[0] not in given], *arguments]
    return name, arguments


@each_of("train")
def test_training_commands_compose(command):
    """As written: keys, groups, recipes, values, and what several keys say together."""
    name, arguments = filled(command)
    if "generation.backend=vllm" in arguments:  # composes where vLLM's environment is not made too
        arguments = [*arguments, f"generation.vllm.python={sys.executable}"]
    composed_of(name, tuple(check_overrides(arguments, ROOTS[name][0], CONF)))


class Parsed(BaseException):
    """The arguments were understood."""


@each_of("script", "module")
def test_other_scripts_know_their_arguments(command, monkeypatch):
    """Each is begun as the page says, up to the point where its arguments are understood."""
    understand = argparse.ArgumentParser.parse_args

    def parse(self, *args, **kwargs):
        understand(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    words = command.words
    try:
        if command.script is not None:
            path = ROOT / "examples" / f"{command.script}.py"
            monkeypatch.setattr(sys, "argv", [str(path), *command.arguments])
            runpy.run_path(str(path), run_name="__main__")
        else:
            arguments = [word for word in words[3:] if word not in ("...", "…")]
            monkeypatch.setattr(sys, "argv", [words[2], *arguments])
            runpy.run_module(words[2], run_name="__main__")
    except Parsed:
        return
    except SystemExit as ended:
        if ended.code == 0 and "--help" in words:
            return
        pytest.fail(f"{command.place}: {command.text}: ended with {ended.code}")
    pytest.fail(f"{command.place}: {command.text}: took no arguments")


@each_of("make")
def test_make_has_the_target_and_its_commands_compose(command):
    """`make --dry-run`: what it would type is held to the same as what a page would."""
    words = [word.replace("…", "").strip() for word in command.words[1:] if word != "…"]
    told = subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    for variable in re.findall(r"^([A-Z_0-9]+)=", "\n".join(words), re.MULTILINE):
        assert re.search(rf"\b{variable}\b", (ROOT / "Makefile").read_text()), variable
    for made in shell_lines(command.page, command.line, told.stdout.replace("\t", " ")):
        if made.script is not None and made.script.startswith("train_gpt"):
            test_training_commands_compose(made)


def test_blocks_are_commands_data_or_drawings():
    """json: every line is a value; python: it compiles; text: formulas, drawings, trees."""
    problems = []
    for block in blocks():
        place = f"{block.page}:{block.line}"
        if block.language == "json":
            for line in filter(str.strip, block.text.splitlines()):
                json.loads(line)
        elif block.language == "python":
            source = re.sub(r"(?m)^(def .*:)\n\Z", r"\1 ...\n", block.text)  # a signature
            compile(source, place, "exec")
        elif block.language == "mermaid":
            problems += [f"{place}: {problem}" for problem in misdrawn(block.text)]
        elif block.language not in ("sh", "bash", "text", "yaml"):
            problems.append(f"{place}: a block of language '{block.language}'")
    check(
        problems,
        "name its language: sh (it is composed and run), python, json, yaml, mermaid or text",
    )


FROM_ELSEWHERE = {"GPTModel"}  # megatron-core's


def misdrawn(drawing):
    """Nodes without a label, and labelled classes that the library does not have."""
    labelled = set(re.findall(r'\b(\w+)\["', drawing))
    arrows = [re.sub(r"\[.*?\]", "", line) for line in drawing.splitlines() if "-->" in line]
    joined = {name.strip() for line in arrows for name in line.split("-->")}
    yield from (f"{name} has no label" for name in joined - labelled)
    known = "\n".join(path.read_text() for path in modules())
    classes = {name for name in labelled if re.fullmatch(r"[A-Z][A-Za-z]*", name)}
    for name in classes - FROM_ELSEWHERE:
        if not re.search(rf"^class {name}\b", known, re.MULTILINE):
            yield f"no class is called {name}"


SECTIONS = sorted({name for root, _ in ROOTS.values() for name in field_types(root)})
KEY = re.compile(rf"[+~]*((?:{'|'.join(SECTIONS)})(?:\.\w+)+)(=.*)?")
FILES = re.compile(r"\.(py|safetensors|nemo|md|yaml|pt|jsonl?|gguf|bin|html|ckpt)$")


def keys_of_pages():
    for page, line, text in spans():
        for word in shlex.split(text) if re.search(r"\w=", text) else [text]:
            match = KEY.fullmatch(word)
            if match and not FILES.search(match[1]):
                yield f"{page}:{line}", match[1], (match[2] or "").removeprefix("=")


def test_every_key_that_is_named_is_one_and_takes_the_value():
    """In prose and in every cell of every table, for one script at least."""
    problems = []
    for place, key, value in keys_of_pages():
        errors = [error for root, _ in ROOTS.values() if (error := refusal(root, key, value))]
        if len(errors) == len(ROOTS):
            problems.append(f"{place}: {errors[0]}")
    check(problems, "correct the page; a key of another library is written without its section")


def refusal(root, key, value):
    try:
        check_key(key, root)
        if value and not re.search(r"…|\.\.\.|<|^[A-Z_]+$", value):
            hint = hint_of(root, key)
            parsed = OverridesParser.create().parse_override(f"{key}={value}").value()
            if hint is not None and not isinstance(parsed, dict):
                build(hint, parsed, key)
    except (AlignerError, HydraException) as error:
        return str(error)
    return None


def hint_of(root, key):
    level = root
    for name in key.split(".")[:-1]:
        level = section_in(field_types(level)[name])
        if level is None:  # below a free-form mapping
            return None
    return field_types(level)[key.rsplit(".", 1)[-1]]
