"""Entry of all scripts: hydra composes the configuration, typed dataclasses validate it.

Overrides are checked against the dataclasses before hydra reads them, because hydra's messages
suggest no similar key.
"""

import difflib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from aligner.catalog import imported
from aligner.compat.nemo_aligner import is_inert, remedy
from aligner.config import parse
from aligner.config.base import BASES
from aligner.config.load import Root, load_config, with_built_in_task
from aligner.config.run import BaseRunConfig, RunConfig
from aligner.errors import AlignerError, ConfigError, raised_as
from aligner.foreign_keys import table

# Options of hydra whose value is the next argument.
OPTIONS_WITH_VALUE = (
    *("--config-name", "-cn", "--config-dir", "-cd", "--config-path", "-cp"),
    *("--package", "-p", "--cfg", "-c", "--info", "-i", "--experimental-rerun"),
)


def launch(
    command: Callable[[Root], Any] | str,
    conf_dir: Path,
    config_name: str,
    root: type[Root] = RunConfig,  # type: ignore[assignment]
) -> None:
    """Load the configuration from file and command line, and call ``command`` with it.

    Args:
        command: a function of the configuration, or its path ``package.module:function``. A path is
            imported only after the arguments are checked, so that ``--help`` does not import torch.
        conf_dir: folder of the configuration files.
        config_name: name of the file without ``.yaml``. ``--config-name`` selects another file.
        root: dataclass to which the configuration is converted.

    An `AlignerError` is printed and ends the process with status 2. After Ctrl-C, a training run
    saves its state and ends with status 0. A second Ctrl-C, or Ctrl-C in another command, ends the
    process with status 130. With ``HYDRA_FULL_ERROR=1`` the traceback is shown.
    """
    # megatron-core and NeMo warn about optional packages at import. The start-up report lists the
    # missing packages and the effects.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|nemo)\.")
    warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine|cuda_graph_scope).*")
    logging.getLogger("nv_one_logger").setLevel(logging.ERROR)

    @hydra.main(version_base="1.3", config_path=str(conf_dir.resolve()), config_name=config_name)
    def main(composed: DictConfig) -> None:
        sys.argv[:] = command_line  # reports and other processes need the user's arguments
        with reported_errors():
            for section in removed_sections:
                OmegaConf.update(composed, section, None)
            if note := with_built_in_task(composed):
                print(note, flush=True)
            config = load_config(composed, root)
            if not isinstance(command, str):
                command(config)
                return
            # Check import paths and signatures before torch is imported, which takes seconds.
            imported("aligner.algorithms.run.inputs:check_inputs")(config)
            if isinstance(config, BaseRunConfig) and os.environ.get("RANK", "0") == "0":
                print("starting: importing PyTorch and megatron-core", flush=True)
            imported(command)(config)

    # hydra reads sys.argv, so replace the user's arguments by arguments that hydra accepts.
    command_line = list(sys.argv)
    with reported_errors():
        arguments, removed_sections = without_sections(command_line[1:], root)
        sys.argv[1:] = check_overrides(arguments, root, conf_dir)
    main()


def without_sections(arguments: Sequence[str], root: type) -> tuple[list[str], list[str]]:
    """Separate arguments that remove optional sections of ``root``: ``X=null`` or ``~X``.

    Returns (remaining arguments, names of the removed sections). Raises `ConfigError` if a
    remaining argument sets a key of a removed section.
    """
    # hydra would read both as options of a config group.
    remaining, removed = list[str](), list[str]()
    for argument in arguments:
        spelled = re.fullmatch(r"\+{0,2}(\w+)=null|~(\w+)(=\w*)?", argument)
        name = (spelled[1] or spelled[2]) if spelled else ""
        may_be_null = type(None) in get_args(parse.field_types(root).get(name))
        (removed if may_be_null else remaining).append(name if may_be_null else argument)
    for argument in remaining:
        if argument.lstrip("+~").partition(".")[0] in removed:
            raise ConfigError(f"{argument}: its section is set to null. Remove one of the two")
    return remaining, removed


def check_overrides(
    arguments: Sequence[str], root: type = RunConfig, conf_dir: Path | None = None
) -> list[str]:
    """Check command-line arguments and convert them to the syntax of hydra.

    A key of the dataclasses below ``root`` may be absent from the YAML file: ``key=value`` becomes
    hydra's ``++key=value`` (set or add). Options of config groups, ``~key``, ``hydra.*`` and
    hydra's flags are returned unchanged. ``conf_dir``: folder with a subfolder for each config
    group. If None, options of groups are not checked.

    Raises `ConfigError` if an argument is not ``key=value``, sets an unknown key, or selects an
    option that its config group does not contain or that this script does not support. The defaults
    of ``--config-name`` are checked, too. The error lists all invalid arguments.
    """
    # The folders that hydra searches, ``conf_dir`` first. None if some are unknown.
    folders: list[Path] = []
    is_unknown = option_value(arguments, "-cp", "--config-path") is not None
    if conf_dir and not (is_unknown or any("hydra.searchpath" in text for text in arguments)):
        user_folder = option_value(arguments, "-cd", "--config-dir")
        folders = [conf_dir, *([] if user_folder is None else [Path(user_folder)])]
    # Arguments.
    sweeps = any(argument in ("-m", "--multirun") for argument in arguments)
    accepted, is_value = [], False
    refused: list[tuple[str, Any, ConfigError]] = []
    for argument in arguments:
        is_override = not (is_value or argument.startswith("-"))
        is_value = argument in OPTIONS_WITH_VALUE
        if not is_override:
            accepted.append(argument)
            continue
        try:
            accepted += _accepted(_unescaped(argument), root, conf_dir, folders, sweeps)
        except ConfigError as error:
            refused.append(("", argument.partition("=")[2], error))

    # Options in the defaults of a recipe.
    recipe = option_value(arguments, "--config-name", "-cn")
    for path, group, option in _selected_options(recipe, folders) if recipe else ():
        try:
            _check_option(f"{path}: {group}={option}", group, option, root, folders)
        except ConfigError as error:
            refused.append((f"{path}: {group}", option, error))

    # Wrong values are listed with other errors. Without other errors, `load_config` lists them all.
    if refused:
        refused += [("", value, error) for value, error in _wrong_values(accepted, root)]

    # A single error is raised unchanged, several are shown as a table.
    rows = []
    for label, value, refusal in refused:
        begin, _, text = str(refusal).removeprefix(label).partition(": ")
        rows.append((label or begin, value, text))
    if refused:
        table_error = ConfigError(f"{len(rows)} arguments cannot be used\n{table(rows)}")
        raise refused[0][2] if len(refused) == 1 else table_error
    return accepted


def option_value(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value after one of hydra's flags, such as ``--config-name``, or None if absent."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            return value if equals else "".join(arguments[index + 1 : index + 2])
    return None


def _selected_options(recipe: str, folders: Sequence[Path]) -> Iterator[tuple[Path, str, Any]]:
    """Yield (file, group, option) for the group options of a recipe and files it extends."""
    names, visited = [recipe], set[Path]()
    while names:
        name = names.pop(0).removesuffix(".yaml")
        files = (folder / f"{name}.yaml" for folder in folders)
        path = next((file for file in files if file.is_file()), None)
        if path is None or path.parent == folders[0] or path in visited:
            continue
        # A recipe of the user, or of conf/recipes.
        visited.add(path)
        text, remedy = f"{path}: cannot be read", "correct the YAML"
        with raised_as(ConfigError, text, OSError, YAMLError, remedy=remedy):
            content = OmegaConf.to_container(OmegaConf.load(path))
        if not isinstance(content, dict) or "searchpath" in (content.get("hydra") or {}):
            continue
        parent = name.rpartition("/")[0]
        for entry in content.get("defaults") or ():
            if isinstance(entry, str):
                names.append(_absolute(entry, parent))
                continue
            for key, option in entry.items() if isinstance(entry, dict) else ():
                *keywords, group = str(key).split()
                is_literal = option is not None and "${" not in str(option)
                if is_literal and "optional" not in keywords and not group.startswith("hydra/"):
                    yield path, _absolute(group.partition("@")[0], parent), option


def _absolute(name: str, parent: str) -> str:
    """Return the path of ``name``, relative to ``parent`` unless it begins with a slash."""
    return name.lstrip("/") if name.startswith("/") or not parent else f"{parent}/{name}"


def _unescaped(argument: str) -> str:
    """Replace ``\\n``, ``\\r`` and ``\\t`` in double quotes by the character, as YAML does."""
    key, equals, value = argument.partition("=")
    characters = {"n": "\n", "r": "\r", "t": "\t"}

    def quoted(text: re.Match[str]) -> str:
        return re.sub(r"(?s)\\(.)", lambda part: characters.get(part[1], part[0]), text[0])

    return key + equals + re.sub(r'(?s)"(?:[^"\\]|\\.)*"', quoted, value)


def _accepted(
    argument: str, root: type, conf_dir: Path | None, folders: Sequence[Path], allows_sweep: bool
) -> list[str]:
    """Return ``argument`` in hydra's syntax, in a list, or [] for a key without effect."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        key, equals, setting = argument.partition("=")
        problem = "not key=value. A recipe is selected with --config-name recipes/NAME"
        if equals:
            problem = (
                f"hydra cannot read it ({_short(str(error).splitlines()[0])}). Put a value with "
                f"spaces or any of ,:{{}}[]()= into inner quotes: '{key}=\"{_short(setting)}\"'"
            )
        raise ConfigError(f"{_short(argument)}: {problem}") from error
    key = override.key_or_group
    is_sweep = override.is_sweep_override()
    if is_sweep and not allows_sweep:
        raise ConfigError(
            f"{argument}: several values are given. Write a list as '{key}=[...]', or add "
            "--multirun for a run with each value"
        )

    # hydra's own options, and options of config groups.
    if re.match(r"hydra\b", key):
        return [argument]
    value = None if is_sweep else override.value()
    if not key:
        raise ConfigError(f"{_short(argument)}: the key is missing. Write key=value")
    is_folder = any((folder / key).is_dir() for folder in folders or filter(None, [conf_dir]))
    is_group = is_folder or override.package is not None or "/" in key
    if is_group and not isinstance(value, dict):
        if not (override.is_delete() or is_sweep):
            _check_option(argument, key, value, root, folders)
        return [argument]

    # Keys of the dataclasses. hydra's ++ sets a key whether the YAML file has it or not.
    if is_inert(key, value):
        return []
    hint = check_key(key, root)
    _check_kind(key, value, hint)
    return [argument if override.is_delete() else "++" + argument.lstrip("+")]


def _check_kind(key: str, value: Any, hint: Any) -> None:
    """Raise `ConfigError` for a list instead of a mapping, or the reverse. hydra cannot merge them.

    ``hint``: type of the value of ``key``. The items of a mapping are checked, too.
    """
    kinds = {
        "list" if get_origin(arm) is tuple else "mapping"
        for arm in parse.arms_of(hint)
        if get_origin(arm) in (tuple, dict, Mapping) or parse.section_in(arm)
    }
    given = "list" if isinstance(value, list) else "mapping"
    if isinstance(value, list | dict) and kinds and given not in kinds:
        form = f"{key}=[VALUE]" if "list" in kinds else f"{key}.NAME=VALUE"
        raise ConfigError(f"{key}: expected a {kinds.pop()}, got a {given}. Write {form}")
    for name, item in value.items() if isinstance(value, dict) else ():
        _check_kind(f"{key}.{name}", item, parse.type_below(hint, name))


def _wrong_values(arguments: Sequence[str], root: type) -> Iterator[tuple[Any, ConfigError]]:
    """Yield value and error of each of the accepted arguments with a wrong type or range.

    Paths and other texts are not checked.
    """
    keys = (argument for argument in arguments if re.match(r"\+\+(?!hydra\b)", argument))
    for override in OverridesParser.create().parse_overrides(list(keys)):
        if override.is_sweep_override() or "${" in str(override.value()):
            continue
        key, value = override.key_or_group, override.value()
        hint = check_key(key, root)
        try:
            if not isinstance(value, dict | None) and str not in parse.arms_of(hint):
                parse.build(hint, value, key)
        except ConfigError as error:
            yield value, error


def _check_option(origin: str, group: str, value: Any, root: type, folders: Sequence[Path]) -> None:
    """Raise `ConfigError` if a config group lacks the option, or this script does not accept it."""
    if not folders:
        return

    # The group and its options.
    files = {
        path.relative_to(folder / group).with_suffix("").as_posix(): path
        for folder in folders
        for path in sorted((folder / group).rglob("*.yaml"))
    }
    if not files:
        groups = [path.name for folder in folders for path in folder.iterdir() if path.is_dir()]
        similar = difflib.get_close_matches(group, groups, n=1)
        hint = f"The groups are the folders of {folders[0]}"
        if similar:
            hint = f"Did you mean {similar[0]}?"
        raise ConfigError(f"{_short(origin)}: no config group {group}. {hint}")
    options = _options_of(root, group, files, folders[0])

    # The selected options.
    for choice in value if isinstance(value, list) else [value]:
        name = str(choice).removesuffix(".yaml")
        if name in options:
            continue
        similar = difflib.get_close_matches(name[:64], options, n=1)
        reason = f"{group} is a group of settings, and this is not one of its options. "
        if name in files:
            reason = "this is an option of other scripts, and this script does not read it. "
        elif similar:
            reason += f"Did you mean {similar[0]}? "
        remedy = f"Options: {', '.join(options)}. Single settings are written {group}.KEY=VALUE"
        raise ConfigError(f"{_short(origin)}: {reason}{remedy if options else 'Remove it'}")


def _options_of(root: type, group: str, files: Mapping[str, Path], conf_dir: Path) -> list[str]:
    """Return the options in a config group, without those that only other scripts accept."""
    name = f"{root.__module__}:{root.__qualname__}"
    scripts = {base.replace("base", "gpt") for base, path in BASES.items() if path == name}
    # Options in the defaults of this script, and of the other scripts.
    defaults, foreign_defaults = set[str](), set[str]()
    for path in conf_dir.glob("gpt_*.yaml"):
        entries = (entry for entry in OmegaConf.load(path).defaults if not isinstance(entry, str))
        chosen = [entry[key] for entry in entries for key in entry if key.split("@")[0] == group]
        (defaults if path.stem in scripts else foreign_defaults).update(chosen)
    if not defaults:
        return [] if foreign_defaults and scripts else sorted(files)

    def belongs(option: str) -> bool:
        extended = OmegaConf.select(OmegaConf.load(files[option]), "defaults", default=())
        names = {option, *(entry for entry in extended if isinstance(entry, str))}
        return bool(names & defaults) or not names & foreign_defaults

    return [option for option in sorted(files) if belongs(option)]


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


def check_key(key: str, root: type = RunConfig) -> Any:
    """Return the type of ``key``, such as ``model.optim.lr``. Raises `ConfigError` if unknown."""
    hint: Any = root
    prefix = ""
    for name in key.split("."):
        # `level` is the section of `name`, or None below a value.
        level, below = parse.section_in(hint), parse.type_below(hint, name)
        if below is None:
            text = f"{key}: {prefix} has no keys below it. Give its value as {prefix}=..."
            if level is not None:
                wrong = key if remedy(key) else f"{prefix}.{name}".lstrip(".")
                others = [key for key, _ in parse.keys_below(root)]
                text = parse.unknown_key(wrong, list(parse.field_types(level)), prefix, others)
            raise ConfigError(text)
        hint, prefix = below, f"{prefix}.{name}".lstrip(".")
    return hint


@contextmanager
def reported_errors() -> Iterator[None]:
    """Context manager that prints an `AlignerError` or Ctrl-C of the block and ends the process."""
    try:
        yield
    except (AlignerError, KeyboardInterrupt) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        message, status = f"{type(error).__name__}: {error}", 2
        if isinstance(error, KeyboardInterrupt):
            message = "ended by Ctrl-C. The same command continues from the last run state"
            status = 130
        print(message, file=sys.stderr)
        sys.exit(status)
