"""Write the tables of options in docs/, from the docstrings of fields in aligner/config.

    python -m docs.tools.options           name the pages that say something else
    python -m docs.tools.options --write   write them

A table of options is what stands between two marks::

    <!-- options of gpt_ppo: model -model.ppo critic critic.optim=model.optim -->
    <!-- end of options -->

The mark names the configuration whose defaults are shown, then keys. A key stands for all keys
below it; ``-KEY`` leaves keys out. ``A=B`` writes one row for all keys below ``A`` whose docstring
is that of the same key below ``B``: the row names them, refers to ``B`` and lists the defaults that
differ. ``SECTION.KEY@PAGE`` adds the key to a row that refers to the table of another page.
``+shared`` adds a sentence with the defaults of shared options that this configuration
changes. tests/test_options.py compares the pages with this.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from aligner.catalog import ALGORITHMS
from aligner.config import EvaluateConfig, GenerateConfig, ServeConfig
from aligner.config.fields import DERIVED
from aligner.config.parse import arms_of, field_types, section_in

ROOT = Path(__file__).parents[2]
CONF, DOCS = ROOT / "conf", ROOT / "docs"
ROOTS: dict[str, type] = {
    **{one.config_name: one.root_class for one in ALGORITHMS.values()},
    "gpt_generate": GenerateConfig,
    "gpt_evaluate": EvaluateConfig,
    "gpt_serve": ServeConfig,
}
TABLE = re.compile(r"(<!-- options of (\w+): ([^>]*?) -->\n)(.*?)(<!-- end of options -->)", re.S)
PAGE = re.compile(r"\bdocs/(\w+\.md)(#[\w-]+)?")


class Option(NamedTuple):
    """A field: ``meaning`` is its docstring, empty where it has none."""

    key: str
    hint: Any
    meaning: str
    default: Any  # `dataclasses.MISSING` where it has none

    @property
    def section(self) -> type | None:
        """The dataclass of its keys; None: it has a value."""
        return section_in(self.hint)

    @property
    def choices(self) -> list[str]:
        """Values of a field that has a few, as YAML has them."""
        arms = list(arms_of(self.hint))
        arms += [one for arm in arms if get_origin(arm) is tuple for one in get_args(arm)]
        named = [
            str(value) for arm in arms if get_origin(arm) is Literal for value in get_args(arm)
        ]
        return ["null", *named] if named and type(None) in arms else named


@cache
def docstrings(cls: type) -> dict[str, str]:
    """Docstring below each field of a dataclass, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = below.value if isinstance(below, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[field.target.id] = inspect.cleandoc(text.value)
    return found


def fields_of(cls: type, prefix: str = "") -> Iterator[Option]:
    """The fields of one dataclass."""
    for field in dataclasses.fields(cls):
        default = field.default
        if DERIVED in get_args(field_types(cls)[field.name]):
            default = None
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        meaning = docstrings(cls).get(field.name, "")
        yield Option(f"{prefix}{field.name}", field_types(cls)[field.name], meaning, default)


def every_field(cls: type, prefix: str = "") -> Iterator[Option]:
    """Every field below a dataclass, sections included."""
    for option in fields_of(cls, prefix):
        yield option
        if option.section is not None:
            yield from every_field(option.section, f"{option.key}.")


def options(cls: type) -> list[Option]:
    """Every option below a dataclass; of sections those that may be null."""
    return [one for one in every_field(cls) if one.section is None or one.default is None]


def table(name: str, mark: str) -> str:
    """Return the table that a mark requests, for the configuration ``name``."""
    elsewhere = re.findall(r"(\w+)\.(\S+)@(\S+)", mark)
    words = [word for word in mark.split() if word != "+shared" and "@" not in word]
    omitted = [word[1:] for word in words if word.startswith("-")]
    origins = dict(word.split("=") for word in words if "=" in word)
    tree, known = composed(name), options(ROOTS[name])
    rows: list[str] = []
    for key in (word.partition("=")[0] for word in words if not word.startswith("-")):
        selected = [option for option in known if is_below(option.key, key)]
        if not selected:
            raise SystemExit(f"options of {name}: {key} is not a key of {name}")
        excluded = {*omitted, *origins} - {key}
        selected = [o for o in selected if not any(is_below(o.key, key) for key in excluded)]
        origin = origins.get(key)
        shared = shared_with(origin, key, selected) if origin else {}
        rows += [
            f"| `{option.key}` | {shown_default(option, tree)} | {in_markdown(option)} |"
            for option in selected
            if option.key not in shared
        ]
        if origin and shared:
            rows.append(reference(key, origin, [o for o in selected if o.key in shared], tree))
    for section, page in dict.fromkeys((section, page) for section, _, page in elsewhere):
        names = [f"`{key}`" for part, key, of in elsewhere if (part, of) == (section, page)]
        meaning = f"As in [{page}]({page}#options)."
        rows.append(f"| `{section}`: {', '.join(names)} | as there | {meaning} |")
    parts = ["\n".join(["| key | default | meaning |", "|---|---|---|", *rows])] if rows else []
    parts += [other_defaults(name)] if "+shared" in mark.split() else []
    return "\n\n".join(parts)


def other_defaults(name: str) -> str:
    """Return the sentence about shared options whose default in ``name`` is not that of PPO.

    The table of options.md lists the default directories of all scripts.
    """
    reference = {option.key: option for option in options(ROOTS["gpt_ppo"])}
    changed = []
    for option in options(ROOTS[name]):
        if option.key == "exp_manager.explicit_log_dir":
            continue
        if option.key in reference and not is_in_null(option.key, composed(name)):
            default = shown_default(option, composed(name))
            if default != shown_default(reference[option.key], composed("gpt_ppo")):
                changed.append(f"`{option.key}={default.strip('`')}`")
    if not changed:
        return ""
    return f"This command changes defaults of [shared options](options.md): {', '.join(changed)}."


def is_in_null(key: str, tree: Any) -> bool:
    """Return whether a section above ``key`` is null in the composed configuration ``tree``."""
    for name in key.split(".")[:-1]:
        tree = tree.get(name, {})
        if tree is None:
            return True
    return False


def every_option() -> dict[str, tuple[Option, Any]]:
    """Return each option of every configuration with the composed values of that configuration.

    The first configuration of `ROOTS` that has a key describes it.
    """
    found: dict[str, tuple[Option, Any]] = {}
    for name, root in ROOTS.items():
        for option in options(root):
            found.setdefault(option.key, (option, composed(name)))
    return found


def shared_with(origin: str, key: str, selected: list[Option]) -> dict[str, Option]:
    """Return the options below ``key`` whose docstring equals that of the key below ``origin``."""
    known = every_option()
    shared = {}
    for option in selected:
        other = known.get(f"{origin}{option.key.removeprefix(key)}")
        if option.key != key and other and option.meaning == other[0].meaning:
            shared[option.key] = other[0]
    return shared


def reference(key: str, origin: str, shared: list[Option], tree: Any) -> str:
    """Return the row that refers keys below ``key`` to the rows below ``origin``."""
    known = every_option()
    names = [option.key.removeprefix(f"{key}.") for option in shared]
    changed = []
    for name, option in zip(names, shared, strict=True):
        other, values = known[f"{origin}.{name}"]
        default = shown_default(option, tree)
        if default != shown_default(other, values):
            changed.append(f"`{name}={default.strip('`')}`")
    defaults = f" Other defaults: {', '.join(changed)}." if changed else ""
    listed = ", ".join(f"`{name}`" for name in names)
    page = "ppo.md#options" if origin.endswith(".ppo") or ".ppo." in origin else "options.md"
    return f"| `{key}`: {listed} | as there | As in [`{origin}`]({page}).{defaults} |"


def is_below(key: str, section: str) -> bool:
    """Return whether ``key`` is ``section`` or one of its keys."""
    return f"{key}.".startswith(f"{section}.")


@cache
def composed(name: str) -> Any:
    """The configuration of a script, as hydra composes it."""
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose(name), resolve=True)


def shown_default(option: Option, tree: Any) -> str:
    """Default of a cell: the script's, and where it has none the dataclass's."""
    value = tree
    for name in option.key.split("."):
        value = value.get(name, "???") if isinstance(value, dict) else "???"
    value = option.default if value == "???" else value
    if value is dataclasses.MISSING:
        return "required"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def in_markdown(option: Option) -> str:
    """Cell of an option's meaning, on one line and with links to the pages it names."""
    text = " ".join(option.meaning.split()).replace("|", "\\|")
    return PAGE.sub(lambda page: f"[{page[1]}]({page[1]}{page[2] or ''})", text)


def page(text: str) -> str:
    """A page with its tables written anew."""
    return TABLE.sub(lambda mark: f"{mark[1]}\n{table(mark[2], mark[3])}\n\n{mark[5]}", text)


def stale() -> dict[Path, str]:
    """Pages that say something else of options than the sections, as they should be."""
    texts = {path: path.read_text() for path in sorted(DOCS.glob("*.md"))}
    return {path: page(text) for path, text in texts.items() if page(text) != text}


def main() -> None:
    """Name the pages that say something else; with ``--write`` write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the pages anew")
    write = parser.parse_args().write
    found = stale()
    for path, text in found.items():
        print(path.relative_to(ROOT))
        if write:
            path.write_text(text)
    if not found:
        print("docs/ says what aligner/config says")


if __name__ == "__main__":
    main()
