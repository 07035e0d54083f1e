"""Entry of every training script: hydra composes, typed dataclasses validate.

Hydra knows a key by the YAML it has composed, and its own messages name no alternative. What can be
set is what the dataclasses have, so overrides are held against them before hydra sees them.
"""

import difflib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from aligner.catalog import imported
from aligner.config.base import BASES
from aligner.config.load import Root, load_config, with_built_in_task
from aligner.config.parse import field_types, keys_below, section_in, type_below, unknown_key
from aligner.config.run import RunConfig
from aligner.errors import AlignerError, ConfigError
from aligner.foreign_keys import is_inert, remedy, table

# Options of hydra whose value is the argument after them.
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
    """Compose ``conf_dir/config_name`` with the command line, validate it and call ``command``.

    Args:
        command: a function of the configuration; by its name ``package.module:function`` where it
            is to be imported only now (torch is not, for ``--help``).
        conf_dir: where the configuration is.
        config_name: its name there; the command line may give another.
        root: what it describes.

    An ``AlignerError`` ends the process with status 2 and its message instead of a traceback,
    Ctrl-C with status 130 (the first one lets a run that makes steps save and end, with status 0);
    set ``HYDRA_FULL_ERROR=1`` to see the traceback.
    """
    _quiet_imports()

    @hydra.main(version_base="1.3", config_path=str(conf_dir.resolve()), config_name=config_name)
    def main(composed: DictConfig) -> None:
        sys.argv[:] = given  # what a report shows and further processes are started with
        with reported_errors():
            for section in absent:
                OmegaConf.update(composed, section, None)
            if note := with_built_in_task(composed):
                print(note, flush=True)
            config = load_config(composed, root)
            run = imported(command) if isinstance(command, str) else command
            run(config)

    given = list(sys.argv)
    with reported_errors():
        present, absent = without_sections(given[1:], root)
        sys.argv[1:] = check_overrides(present, root, conf_dir)
    main()


def _quiet_imports() -> None:
    """Silence the warnings of megatron-core and NeMo at import about optional packages.

    The start-up report lists the optional packages that are missing and what that disables.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|nemo)\.")
    warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine|cuda_graph_scope).*")
    logging.getLogger("nv_one_logger").setLevel(logging.ERROR)


def without_sections(arguments: Sequence[str], root: type) -> tuple[list[str], list[str]]:
    """Split ``SECTION=null`` and ``~SECTION`` off a command line, for sections that may be null.

    hydra reads both as choices of a config group, and keeps the section's keys of the base and of
    the recipe, so that the section has to be removed after the composition.

    Returns:
        the other arguments, and the names of the sections.

    Raises:
        ConfigError: another argument sets a key of such a section.
    """
    present, absent = list[str](), list[str]()
    for argument in arguments:
        spelled = re.fullmatch(r"\+{0,2}(\w+)=null|~(\w+)(=\w*)?", argument)
        name = (spelled[1] or spelled[2]) if spelled else ""
        may_be_null = type(None) in get_args(field_types(root).get(name))
        (absent if may_be_null else present).append(name if may_be_null else argument)
    for argument in present:
        if argument.lstrip("+~").partition(".")[0] in absent:
            raise ConfigError(f"{argument}: its section is set to null. Remove one of the two")
    return present, absent


def check_overrides(
    arguments: Sequence[str], root: type = RunConfig, conf_dir: Path | None = None
) -> list[str]:
    """The command line as hydra accepts it, once what hydra would not has been refused.

    Any key in the tree of dataclasses below ``root`` can be set, whether or not the composed YAML
    has it, and whatever stands on the way to it: ``key=value`` and ``+key=value`` become
    ``++key=value``. Choices of a config group, ``~key``, ``hydra.*`` and options stay as they are.

    Args:
        arguments: what follows the name of the script.
        root: what the configuration describes.
        conf_dir: where the config groups are. None means none is known.

    Raises:
        ConfigError: an argument that is no override, a key that no dataclass has (with the nearest
            that one has), an option that a group does not have. Several are one table.
    """
    searched = None if _elsewhere(arguments) else conf_dir
    sweeps = any(argument in ("-m", "--multirun") for argument in arguments)
    accepted, refused, is_value = [], [], False
    for argument in arguments:
        is_override = not (is_value or argument.startswith("-"))
        is_value = argument in OPTIONS_WITH_VALUE
        if not is_override:
            accepted.append(argument)
            continue
        try:
            accepted += _accepted(_unescaped(argument), root, conf_dir, searched, sweeps)
        except ConfigError as error:
            refused.append((argument, error))
    if len(refused) == 1:
        raise refused[0][1]
    if refused:
        rows = []
        for argument, refusal in refused:
            key, _, said = str(refusal).partition(": ")
            rows.append((key, argument.partition("=")[2], said))
        raise ConfigError(f"{len(rows)} arguments cannot be used\n{table(rows)}")
    return accepted


def _elsewhere(arguments: Sequence[str]) -> bool:
    """Return whether configuration may come from further directories."""
    return any(
        argument.split("=")[0] in ("-cd", "--config-dir", "-cp", "--config-path")
        or "hydra.searchpath" in argument
        for argument in arguments
    )


def _unescaped(argument: str) -> str:
    """Replace ``\\n``, ``\\r`` and ``\\t`` in double quotes: YAML does, hydra does not."""
    key, equals, value = argument.partition("=")
    characters = {"n": "\n", "r": "\r", "t": "\t"}

    def quoted(text: re.Match[str]) -> str:
        return re.sub(
            r"\\(.)", lambda part: characters.get(part[1], part[0]), text[0], flags=re.DOTALL
        )

    return key + equals + re.sub(r'"(?:[^"\\]|\\.)*"', quoted, value, flags=re.DOTALL)


def _accepted(
    argument: str, root: type, conf_dir: Path | None, searched: Path | None, sweeps: bool
) -> list[str]:
    """The argument as hydra has it; none where it asks for what is done anyway."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise ConfigError(_malformed(argument, error)) from error
    if override.is_sweep_override() and not sweeps:
        raise ConfigError(
            f"{argument}: several values. Write a list as "
            f"'{override.key_or_group}=[...]', or add --multirun for a run of each"
        )
    key = override.key_or_group
    if re.match(r"hydra\b", key):
        return [argument]
    value = None if override.is_sweep_override() else override.value()
    if not key:
        raise ConfigError(f"{_short(argument)}: names no key. Write it as key=value")
    is_choice = _is_group(key, conf_dir) or override.package is not None or "/" in key
    if is_choice and not isinstance(value, dict):
        if not (override.is_delete() or override.is_sweep_override()):
            _check_choice(argument, key, value, root, searched)
        return [argument]
    if is_inert(key, value):
        return []
    check_key(key, root)
    return [argument if override.is_delete() else "++" + argument.lstrip("+")]


def _malformed(argument: str, error: HydraException) -> str:
    if "=" not in argument:
        return (
            f"{argument}: is not of the form key=value; a recipe is chosen with "
            "--config-name recipes/NAME"
        )
    key, _, value = argument.partition("=")
    reason = str(error).splitlines()[0]
    return (
        f"{_short(argument)}: hydra cannot read it ({_short(reason)}). Put a value with spaces or "
        f"any of ,:{{}}[]()= into quotes of its own: '{key}=\"{_short(value)}\"'"
    )


def _is_group(key: str, conf_dir: Path | None) -> bool:
    return conf_dir is not None and (conf_dir / key).is_dir()


def _check_choice(argument: str, group: str, value: Any, root: type, conf_dir: Path | None) -> None:
    """Refuse a value of a config group that is not one of its options, or not the script's."""
    if conf_dir is None:
        return
    known = sorted(path.stem for path in (conf_dir / group).glob("*.yaml"))
    if not known:
        near = difflib.get_close_matches(
            group, [path.name for path in conf_dir.iterdir() if path.is_dir()], n=1
        )
        hint = f"did you mean {near[0]}?" if near else f"see the folders of {conf_dir}"
        raise ConfigError(f"{_short(argument)}: there is no config group {group}; {hint}")
    options = _options_of(root, group, known, conf_dir)
    for choice in value if isinstance(value, list) else [value]:
        if choice in options:
            continue
        near = difflib.get_close_matches(str(choice)[:64], options, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        reason = f"{group} is a group of settings, chosen by name; {hint}"
        if choice in known:
            reason = "it is an option of other scripts, and nothing reads it in this one. "
        remedy = (
            f"Options: {', '.join(options)}. Single settings are keys below it, {group}.KEY=VALUE"
        )
        raise ConfigError(f"{_short(argument)}: {reason}{remedy if options else 'Remove it'}")


def _options_of(root: type, group: str, known: Sequence[str], conf_dir: Path) -> list[str]:
    """The options of a config group that the script with the configuration ``root`` reads.

    An option that is a default of scripts, or extends one, belongs to these scripts; any other
    belongs to every script that has the group.
    """
    name = f"{root.__module__}:{root.__qualname__}"
    scripts = {base.replace("base", "gpt") for base, path in BASES.items() if path == name}
    own, foreign = set[str](), set[str]()
    for path in conf_dir.glob("gpt_*.yaml"):
        entries = (entry for entry in OmegaConf.load(path).defaults if not isinstance(entry, str))
        chosen = [entry[key] for entry in entries for key in entry if key.split("@")[0] == group]
        (own if path.stem in scripts else foreign).update(chosen)
    if not own:
        return [] if foreign and scripts else list(known)

    def belongs(option: str) -> bool:
        path = conf_dir / group / f"{option}.yaml"
        extended = OmegaConf.select(OmegaConf.load(path), "defaults", default=())
        names = {option, *(entry for entry in extended if isinstance(entry, str))}
        return bool(names & own) or not names & foreign

    return [option for option in known if belongs(option)]


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


def check_key(key: str, root: type = RunConfig) -> None:
    """Refuse a dotted key that is not in the tree of dataclasses below ``root``."""
    hint: Any = root
    prefix = ""
    for name in key.split("."):
        level, below = section_in(hint), type_below(hint, name)
        if below is None and level is not None:
            wrong = key if remedy(key) else f"{prefix}.{name}".lstrip(".")
            known = list(field_types(level))
            raise ConfigError(
                unknown_key(wrong, known, prefix, [key for key, _ in keys_below(root)])
            )
        if below is None:
            raise ConfigError(
                f"{key}: {prefix} has no keys below it. Give its value as {prefix}=..."
            )
        hint, prefix = below, f"{prefix}.{name}".lstrip(".")


@contextmanager
def reported_errors() -> Iterator[None]:
    """An `AlignerError` or Ctrl-C in the block ends the process as in `launch`."""
    try:
        yield
    except AlignerError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print("ended by Ctrl-C; the same command goes on from the last run state", file=sys.stderr)
        sys.exit(130)
