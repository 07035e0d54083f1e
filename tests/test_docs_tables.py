"""Every table of the documentation is held to what it speaks of, row by row.

``TABLES`` says of every header what a row claims and which check holds it; a header that is not
there fails. ``RESULTS`` are numbers that a run came to: each is tied to the command that makes it,
and tests/docs/test_documented_runs.py makes those that a small machine makes in a minute.
"""

import ast
import re
import shlex
from functools import cache

import pytest
from documented import CONF, ROOT, Command, commands, tables
from hydra.core.override_parser.overrides_parser import OverridesParser
from test_conf import ROOTS
from test_docs import options as every_option
from test_docs_commands import composed_of, hint_of, kind_of
from test_layering import PACKAGES, modules

from aligner.config.cli import check_key, check_overrides
from aligner.config.parse import build
from aligner.errors import AlignerError
from aligner.observe.metric_names import describe

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
    return [
        f"{table.place}: no metric {name}"
        for row in table.rows
        for name in code(row[0])
        if describe(name) is None
    ]


def values_of(key):
    """Rows are values of ``key``."""

    def check(table):
        problems = []
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
                problems.append(f"{table.place}: {error}")
        return problems

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
    problems = []
    for row in table.rows:
        settings = [word for span in code(row[1]) for word in shlex.split(span) if "=" in word]
        if not settings:
            problems.append(f"{table.place}: {row[0]} sets nothing")
        try:
            composed_of(name, tuple(check_overrides([*needed, *settings], root, CONF)))
        except AlignerError as error:
            problems.append(f"{table.place}: {row[0]}: {error}")
    return problems


def with_commands(table):
    """A row is what its command comes to."""
    known = {(command.page, command.text) for command in commands()}
    column = next(
        index for index, name in enumerate(table.header) if name in ("command", "replicate")
    )
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
    places = [
        ROOT,
        ROOT / "examples",
        ROOT / "tests",
        ROOT / "tests/vllm",
        ROOT / "aligner/losses",
        ROOT / "aligner/distributed",
    ]

    def check(table):
        problems = []
        for row in table.rows:
            for column in columns:
                found = [*code(row[column]), *re.findall(r"\]\(([^)#]+)", row[column])]
                found = [
                    name for name in found if re.fullmatch(r"[\w./*-]+(/|\.\w+|\*)|tests/\w+", name)
                ]
                for name in found:
                    if not any(
                        list(place.glob(name.rstrip("/"))) for place in [*places, ROOT / "docs"]
                    ):
                        problems.append(f"{table.place}: {name} is not there")
                if not found and column == columns[0]:
                    problems.append(f"{table.place}: no file in {row[column]}")
        return problems

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
    problems = []
    for row in table.rows:
        for message in code(row[0]):
            for part in re.split(r"…|\.\.\.|\d+|[][();:'=,]", message):
                words = part.split()
                if len(part.strip()) >= 8 and 2 * longest_run(words) < len(words):
                    problems.append(f"{table.place}: nothing says '{part.strip()}'")
    return problems


def longest_run(words):
    """The most adjacent words that one string of the code has: others may be values."""
    runs = ((i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    said = (said_in_the_code(), FOREIGN)
    found = [j - i for i, j in runs if any(" ".join(words[i:j]) in text for text in said)]
    return max(found, default=0)


def explained(why):
    """Held elsewhere, or by nobody: ``why`` says where or why not."""
    named = re.findall(r"(?:tests|docs)/[\w/.]*\w", why)
    assert [name for name in named if not (ROOT / name).exists()] == []

    def check(table):
        return []

    return check


# First cells of a header: what holds the rows.
TABLES = {
    ("key", "default", "meaning"): written,
    ("key", "meaning"): explained("test_every_key_that_is_named_is_one_and_takes_the_value"),
    ("layout", "key"): explained("the same; docs/parity.md's tests have every layout"),
    ("mode", "keys"): explained("the same"),
    ("column", "option"): explained("the same"),
    ("metric", "meaning"): metrics,
    ("`trainer.dpo.loss`",): values_of("trainer.dpo.loss"),
    ("`reward.function`",): values_of("reward.function"),
    ("estimator", "value"): values_of("trainer.ppo.kl_estimator"),
    ("`kl_loss.estimator`",): values_of("model.ppo.kl_loss.estimator"),
    ("algorithm", "set"): algorithms,
    ("command",): with_commands,
    ("benchmark", "compares", "replicate"): with_commands,
    ("benchmark", "measured (aligner over the other)"): measured,
    ("what", "script", "page"): paths(1, 2),
    ("you want to", "page"): paths(1),
    ("script", "what it does"): paths(0),
    ("folder", "what it shows"): paths(0),
    ("what", "where"): paths(1),
    ("layer", "modules"): layers,
    ("to add", "files of the library to change"): explained("tests/learning/test_extend.py"),
    ("term", "meaning"): explained("definitions; keys in them are held to what exists"),
    ("older word", "the field's"): explained("a dictionary for readers of older pages"),
    ("process", "started by"): explained(
        "tests/ray, tests/distributed, tests/unit/test_reward_server.py"
    ),
    ("stage", "computed by"): explained(
        "tests/unit/test_ppo_trainer.py; aligner/types.py has the columns"
    ),
    ("question", "test"): paths(1),
    ("algorithm", "functions"): paths(1),
    ("message",): messages,
    ("file", "what it holds"): explained("tests/docs/test_documented_runs.py looks for each"),
    ("file", "what it is"): explained("tests/docs/test_documented_runs.py looks for each"),
    ("engine", "who starts the workers"): explained("tests/distributed/test_scripts.py, tests/ray"),
    ("what", "what happens"): explained("tests/ray kills each"),
    ("in the archive", "written by"): explained(
        "tests/unit/test_nemo_real_files.py, tests/distributed/test_nemo_layouts.py"
    ),
    ("family", "`model_type`"): explained("tests/unit/test_hf_families.py converts one of each"),
    ("request", "answer"): explained("tests/unit/test_reward_server.py asks"),
    ("status", "means"): explained("tests/unit/test_reward_server.py asks"),
    ("NeMo-RL", "value"): explained("tests/test_gsm8k_recipes.py holds it to the recipe"),
    ("item", "status"): explained("tests/published executes them; tests/published/test_page.py"),
    ("topic",): explained("other libraries' formulas; tests/unit has ours"),
    ("what you see",): explained("advice to people"),
    ("package", "with it"): explained("the start-up report; tests/unit/test_observe_startup.py"),
    ("extra", "for"): explained("tests/unit/test_extras.py compares it with pyproject.toml"),
    ("number", "meaning"): explained("tests/unit has the formulas of mean@k, pass@k and maj@k"),
    ("what", "seen where"): explained("what nobody has run, and what stands in for it"),
    ("campaign", "what it does"): explained("`make campaign` runs each and prints a line of it"),
    ("column", "processes"): explained("names of the columns of docs/parity.md"),
    ("row", "what is compared"): explained("names of the rows of docs/parity.md"),
}
# Numbers that take too long for a test: first cells of the header, and the command that makes them.
# The page has the machine and the date.
RESULTS = {
    ("seed", "before"): "make ppo",
    ("seed", "after fine-tuning"): "make agent",
    ("step", "seed 1"): "make ppo",
    ("model", "made from"): "make pipeline",
    ("stage", "held out"): "make pipeline DATA=gsm8k GSM8K=path/of/gsm8k",
    ("padded",): "python -m benchmarks.parity",
    ("dynamic",): "python -m benchmarks.parity",
    ("packed",): "python -m benchmarks.parity",
    ("shared",): "python -m benchmarks.parity",
    ("formula", "peer"): "python -m benchmarks.formulas",
    ("precision", "`logprob_gap_mean`"): (
        "python examples/train_gpt_reinforce.py --config-name recipes/grpo_smollm2_arithmetic_cpu"
    ),
    ("rollouts by",): "python examples/train_gpt_ppo.py --config-name recipes/ppo_tiny_cpu",
    ("", "accuracy at the end"): "python -m benchmarks.value_parity",
    ("credit", "seed 1"): "python -m benchmarks.turn_credit",
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
        f"{table.place}: nobody holds a table with the header {table.header}; say in TABLES "
        "(tests/test_docs_tables.py) what its rows claim, or in RESULTS which command makes them"
    )
    assert all(len(row) == len(table.header) for row in table.rows), f"{table.place}: ragged"
    problems = check(table)
    assert problems == [], "\n".join(problems)


TRAINING = {"ppo", "reinforce", "rs", "sft", "dpo", "reward", "distill"}  # pages, and scripts
# Parts of docs/options.md, and the pages of the scripts that take what stands there.
SHARED = {
    "Every training run": TRAINING,
    "Runs that sample and score": {"ppo", "reinforce", "rs"},
}


def keys_on(page, begin=0, end=None):
    """Keys of the tables of options between two lines of a page."""
    found = [
        name
        for table in tables()
        if table.page == f"docs/{page}.md" and table.header[:3] == ("key", "default", "meaning")
        if begin <= table.line and (end is None or table.line < end)
        for row in table.rows
        for name in code(row[0])
    ]
    assert len(found) == len(set(found)), page
    return set(found)


def parts():
    """Heading of a part of docs/options.md, and the keys in it."""
    lines = (ROOT / "docs" / "options.md").read_text().splitlines()
    starts = [(n, line[3:]) for n, line in enumerate(lines, 1) if line.startswith("## ")]
    ends = [*(n for n, _ in starts[1:]), None]
    return {name: keys_on("options", n, end) for (n, name), end in zip(starts, ends, strict=True)}


def test_shared_options_are_those_of_the_scripts_that_share_them():
    assert parts().keys() == SHARED.keys()
    for part, keys in parts().items():
        taken = {
            key: {one for one in TRAINING if takes(ROOTS[SCRIPT_OF[one]][0], key)} for key in keys
        }
        assert {key: pages for key, pages in taken.items() if pages != SHARED[part]} == {}


@pytest.mark.parametrize("page", sorted(TRAINING))
def test_every_option_of_an_algorithm_is_on_its_page_or_shared(page):
    """Of REINFORCE and its kin, which are PPO without a critic, on PPO's."""
    found = {"ppo"} if page == "reinforce" else {page}
    found = set().union(*map(keys_on, found)) | keys_on(page)
    found |= {key for part, keys in parts().items() if page in SHARED[part] for key in keys}
    assert {key for key, _ in every_option(ROOTS[SCRIPT_OF[page]][0])} - found == set()


def test_every_entry_has_a_table():
    headers = [table.header for table in tables()]
    stale = [
        header
        for header in [*TABLES, *RESULTS]
        if not any(known[: len(header)] == header for known in headers)
    ]
    assert stale == []
