"""Python objects and rows as values of configuration keys, without a run."""

import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import aligner
from aligner.api.objects import as_setting, is_rows, write_rows
from aligner.config.cli import _unescaped
from aligner.errors import ConfigError, DataError
from aligner.foreign_keys import as_override

BONUS = 2.0


def outside(prompts, responses, **columns):
    return [BONUS] * len(prompts)


def as_notebook(text, name="reward"):
    """A function as a notebook has it: of no module that can be imported."""
    namespace = {"__name__": "__main__"}
    exec(compile(text, "<cell>", "exec"), namespace)
    return namespace[name]


def loaded(path):
    file, _, name = path.rpartition(":")
    spec = importlib.util.spec_from_file_location("written", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def test_a_function_of_a_module_is_named(tmp_path):
    assert as_setting("reward.function", math.sqrt, tmp_path) == "math:sqrt"
    values = [Path("x"), 1, {"b": math.sqrt}]
    assert as_setting("a", values, tmp_path) == ["x", 1, {"b": "math:sqrt"}]
    assert list(tmp_path.iterdir()) == []


CELL = """
BONUS = {bonus}
def helper(text):
    return {helper}
def reward(prompts, responses, **columns):
    return [BONUS + helper(response) for response in responses]
"""


def test_a_function_of_a_notebook_is_loaded_by_another_process(tmp_path):
    function = as_notebook(CELL.format(bonus=2, helper="len(text)"))
    path = as_setting("reward.function", function, tmp_path)
    assert loaded(path)(["p"], ["abc"]) == [5]
    file, _, name = path.rpartition(":")
    program = f"import runpy; print(runpy.run_path({file!r})[{name!r}](['p'], ['abcd']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[6]\n", done.stderr


LOADS = """
import importlib.util, runpy, sys
from pathlib import Path
from aligner.api.objects import as_setting

if sys.argv[1] == "runpy":
    runpy.run_path(sys.argv[2], {"as_setting": as_setting, "Path": Path})
else:
    spec = importlib.util.spec_from_file_location("of_no_folder", sys.argv[2])
    module = importlib.util.module_from_spec(spec)
    sys.modules["of_no_folder"] = module
    module.as_setting, module.Path = as_setting, Path
    spec.loader.exec_module(module)
"""


@pytest.mark.parametrize("loader", ["runpy", "importlib"])
def test_a_function_of_a_script_that_another_program_executes(tmp_path, loader):
    script = tmp_path / "scripts" / "script.py"
    script.parent.mkdir()
    call = f"print(as_setting('reward.function', reward, Path({str(tmp_path)!r})))"
    script.write_text(f"{CELL.format(bonus=2, helper='len(text)')}\n{call}\n")
    words = [sys.executable, "-c", LOADS, loader, str(script)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert loaded(done.stdout.strip())(["p"], ["abc"]) == [5]


def test_the_file_changes_with_the_code_and_with_the_values_that_the_code_reads(tmp_path):
    def text(**cell):
        path = as_setting("key", as_notebook(CELL.format(**cell)), tmp_path)
        return Path(path.rpartition(":")[0]).read_text()

    first = text(bonus=2, helper="len(text)")
    assert text(bonus=2, helper="len(text)") == first
    assert text(bonus=3, helper="len(text)") != first
    assert text(bonus=2, helper="-len(text)") != first


def test_closures_partials_methods_and_callable_objects(tmp_path):
    def scaled(factor):
        return lambda prompts, responses, **columns: [factor] * len(prompts)

    class Scorer:
        def __init__(self, value):
            self.value = value

        def __call__(self, prompts, responses, **columns):
            return [self.value] * len(prompts)

    texts = set()
    functions = [scaled(1.0), scaled(2.0), functools.partial(outside), Scorer(3.0), Scorer(4.0)]
    for index, function in enumerate([*functions, Scorer(5.0).__call__]):
        path = as_setting(f"key{index}", function, tmp_path)
        assert loaded(path)(["p"], ["r"]) == function(["p"], ["r"])
        texts.add(Path(path.rpartition(":")[0]).read_text().replace(f"key{index}", "key"))
    assert len(texts) == 6


def test_classes_keep_their_name_and_change_with_their_methods(tmp_path):
    cell = "class Env:\n    limit = {limit}\n    def step(self, _):\n        return {result}\n"
    texts = set()
    for limit, result in ((1, "1"), (2, "1"), (1, "2")):
        cls = as_notebook(cell.format(limit=limit, result=result), "Env")
        path = as_setting("environment.factory", cls, tmp_path)
        assert path.endswith(":Env")
        assert loaded(path)().step(None) == int(result)
        texts.add(Path(path.rpartition(":")[0]).read_text())
    assert len(texts) == 3


CACHED = """
import functools
@functools.lru_cache(maxsize=None)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
def reward(prompts, responses, **columns):
    return [fibonacci(len(response)) for response in responses]
class Table(dict):
    def __call__(self, prompts, responses, **columns):
        return [self[response] for response in responses]
table = Table(abc=2)
"""


@pytest.mark.parametrize("name", ["reward", "table"])
def test_functions_with_a_cache_and_mappings_that_are_called(tmp_path, name):
    path = as_setting("reward.function", as_notebook(CACHED, name), tmp_path)
    file, _, name = path.rpartition(":")
    program = f"import runpy; print(runpy.run_path({file!r})[{name!r}](['p'], ['abc']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[2]\n", done.stderr


def test_an_object_that_cannot_be_pickled_is_refused(tmp_path):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"reward\.function.*inside the function"):
        as_setting("reward.function", lambda prompts, responses, **c: lock, tmp_path)


READS = "\ndef reward(prompts, responses, **columns):\n    return [VALUE(r) for r in responses]\n"
CHANGES = {
    "pattern": ("import re\nVALUE = re.compile(@).search", "'4'", "'5'"),
    "set": ("VALUE = {'a', @}", "'b'", "'c'"),
    "frozenset": ("VALUE = frozenset({'a', @})", "'b'", "'c'"),
    "bytes": ("VALUE = @", "b'4'", "b'5'"),
    "array": ("import numpy as np\nVALUE = np.array([@])", "1.0", "2.0"),
    "tensor": ("import torch\nVALUE = torch.tensor([@])", "1.0", "2.0"),
    "bfloat16": ("import torch\nVALUE = torch.tensor(@).bfloat16()", "1.0", "2.0"),
    "fraction": ("from fractions import Fraction\nVALUE = Fraction(@)", "1", "2"),
    "path": ("from pathlib import Path\nVALUE = Path(@)", "'a'", "'b'"),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass C:\n    x: int\nVALUE = C(@)",
        "1",
        "2",
    ),
    "namespace": ("from types import SimpleNamespace as N\nVALUE = N(x=[{@}])", "1", "2"),
    "slots": ("class C:\n    __slots__ = ('x',)\nVALUE = C()\nVALUE.x = @", "1", "2"),
    "method": ("class C:\n    def f(self): return @\nVALUE = C()", "1", "2"),
    "base": ("class B:\n    def f(self): return @\nclass VALUE(B): pass", "1", "2"),
    "property": ("class VALUE:\n    @property\n    def f(self): return 1 + @", "1", "2"),
    "staticmethod": ("class VALUE:\n    @staticmethod\n    def f(): return @", "1", "2"),
    "classmethod": ("class VALUE:\n    @classmethod\n    def f(cls): return @", "1", "2"),
    "functions": ("def f(r): return @\nVALUE = [f]", "1", "2"),
    "patterns": ("import re\nVALUE = {'a': re.compile(@)}", "'4'", "'5'"),
    "enum": ("import enum\nclass VALUE(enum.Enum):\n    A = @", "1", "2"),
    "default": ("import re\ndef VALUE(r, p=re.compile(@)): return 1", "'4'", "'5'"),
    "constants": ("def VALUE(r): return r in {'a', @}", "'4'", "'5'"),
    "partial": ("import functools, re\nVALUE = functools.partial(print, @)", "{4}", "{5}"),
    "closure": ("def f(x): return lambda r: r in x\nVALUE = f({@})", "4", "5"),
    "wrapper": (
        "import functools\ndef f(g): return functools.wraps(g)(lambda r: g(r) * @)\nVALUE = f(len)",
        "1",
        "2",
    ),
    "list": ("import types\nclass L(list): pass\nVALUE = L([types, @])", "1", "2"),
    "list class": ("class L(list):\n    def f(self): return @\nVALUE = L([1])", "1", "2"),
    "dict class": ("class D(dict):\n    def f(self): return @\nVALUE = {1: D(a=1)}", "1", "2"),
    "text class": ("class S(str):\n    def f(self): return @\nVALUE = [S('a')]", "1", "2"),
    "set class": ("class S(set): pass\nVALUE = S(['a', 'b', @])", "'c'", "'d'"),
    "fields": (
        "from typing import NamedTuple\nclass N(NamedTuple):\n  x: int\nVALUE = N(@)",
        *"12",
    ),
    "cache": ("import functools\ndef f(r): return @\nVALUE = functools.cache(f)", "1", "2"),
    "circle": ("VALUE = [{'a'}]\nVALUE.append(VALUE)\nVALUE.append(@)", "1", "2"),
    "keys": ("VALUE = {('a', 1): {@}, 2: 3}", "4", "5"),
}


def described(cell, folder, name="reward"):
    path = as_setting("key", as_notebook(cell, name), folder)
    return Path(path.rpartition(":")[0]).read_text()


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_value_changes_the_file(tmp_path, kind, caplog):
    cell, first, second = CHANGES[kind]
    cells = [_filled(cell, value) for value in (first, second)]
    texts = [described(text + READS, tmp_path) for text in (cells[0], cells[0], cells[1])]
    assert texts[0] == texts[1] != texts[2]
    assert not caplog.records


def _filled(cell, value):
    return re.sub(r"@(?!property|staticmethod|classmethod|dataclass)", lambda _: value, cell)


def test_equal_files_in_processes_with_other_hashes(tmp_path):
    (tmp_path / "helpers.py").write_text("import re\nLIMIT = {'x', 'y'}\ndef f(r): return LIMIT\n")
    lines = ["import sys, helpers", "from pathlib import Path"]
    lines += ["from aligner.api.objects import as_setting"]
    for index, kind in enumerate(CHANGES):
        lines += [_filled(*CHANGES[kind][:2]).replace("VALUE", f"VALUE_{index}")]
    values = ", ".join(f"VALUE_{index}" for index in range(len(CHANGES)))
    lines += [f"def reward(prompts, responses, **c): return [{values}, helpers.f]"]
    lines += ["as_setting('key', reward, Path(sys.argv[1]))"]
    script, texts = tmp_path / "script.py", []
    script.write_text("\n".join(lines))
    for seed in ("1", "2", "helper"):
        if seed == "helper":
            helper = tmp_path / "helpers.py"
            helper.write_text(helper.read_text().replace("'y'", "'zz'"))
        paths = [
            str(Path(aligner.__file__).parents[1]),
            *os.environ.get("PYTHONPATH", "").split(":"),
        ]
        environment = {**os.environ, "PYTHONHASHSEED": seed.replace("helper", "1")}
        environment["PYTHONPATH"] = ":".join(filter(None, paths))
        words = [sys.executable, str(script), str(tmp_path / seed)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        texts.append((tmp_path / seed / "key.py").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_a_dataclass_of_a_notebook_keeps_its_fields(tmp_path):
    cell = "import dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int\n    y: int = 2\n"
    path = as_setting("generation.backend", as_notebook(cell, "C"), tmp_path)
    program = (
        f"import runpy, dataclasses\nC = runpy.run_path({path.rpartition(':')[0]!r})['C']\n"
        "print([f.default is dataclasses.MISSING for f in dataclasses.fields(C)], C(1).y)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[True, False] 2\n", done.stderr


ROWS = [{"prompt": "a", "level": np.int64(3)}, {"prompt": "b", "scores": np.ones(2)}]


@pytest.mark.parametrize("kind", ["list", "generator", "datasets", "pandas"])
def test_rows_become_json_lines(tmp_path, kind):
    rows, expected = ROWS, [{"prompt": "a", "level": 3}, {"prompt": "b", "scores": [1.0, 1.0]}]
    if kind == "generator":
        rows = (row for row in ROWS)
    if kind in ("datasets", "pandas"):
        expected = [{"prompt": "a", "level": 3}, {"prompt": "b", "level": 4}]
        package = pytest.importorskip(kind)
        table = package.Dataset.from_list if kind == "datasets" else package.DataFrame
        rows = table(expected)
    assert is_rows(rows)
    path, columns = write_rows("data.train.source", rows, tmp_path)
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == expected
    assert columns == {name for row in expected for name in row}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "empty"),
        ([{"prompt": "a"}, "text"], "row 1.*mapping.*str"),
        ([{"prompt": object()}], "row 0.*JSON.*object"),
    ],
)
def test_rows_that_are_refused(tmp_path, rows, message):
    with pytest.raises(DataError, match=rf"data\.train\.source.*{message}"):
        write_rows("data.train.source", rows, tmp_path)


def test_paths_and_generator_functions_are_no_rows():
    for data in ("train.jsonl", Path("train.jsonl"), ["a.jsonl", "b.jsonl"], outside):
        assert not is_rows(data)


TEXTS = ["plain", "a/b-c.nemo", "results/ä ö", "null", "True", "1e3", "", "a, b", "{x: 1}", "[1]"]
TEXTS += ["it's", 'say "x"', "back\\slash", "C:\\new", "ends\\", "it's \\' so", "don't\n"]
TEXTS += ["line\nbreak\ttab", "a=b", "#x"]
OTHERS = [None, True, 3, -1.5, 6e-3, [1, "a b", None], {"size": 3, "text": "a, b"}, [], {}]


@pytest.mark.parametrize("value", [*TEXTS, *OTHERS])
def test_overrides_are_read_as_they_were_given(value):
    argument = _unescaped(f"key={as_override(value)}")
    assert OverridesParser.create().parse_override(argument).value() == value


def test_an_interpolation_in_a_text_stays_text():
    from omegaconf import OmegaConf

    text = OverridesParser.create().parse_override(f"key={as_override('a ${x} b')}").value()
    assert OmegaConf.create({"key": str(text)}).key == "a ${x} b"


def test_unknown_keywords_are_answered_with_the_nearest():
    with pytest.raises(TypeError, match=r"train_ppo.*'max_step'.*max_steps\?.*overrides"):
        aligner.train_ppo(model="m", data="d", max_step=3)


def test_contradictions_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="environment and reward"):
        aligner.train_grpo(model="m", data="d", reward=outside, environment="e")
    with pytest.raises(ConfigError, match=r"model\.optim\.lr"):
        aligner.train_sft(model="m", data="d", lr=1.0, overrides={"model.optim.lr": 2.0})
    assert list(tmp_path.iterdir()) == []


def test_the_package_offers_the_functions_and_imports_quickly():
    assert {"train_grpo", "load_model", "Result"} <= set(dir(aligner))
    with pytest.raises(AttributeError, match="no attribute 'train_gpro'"):
        _ = aligner.train_gpro
    program = "import sys, aligner; aligner.train_grpo; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
