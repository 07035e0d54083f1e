"""Entry of every training script: hydra in front, typed configuration behind.

Hydra's own message for a misspelt override names no alternative, so overrides are checked
against the dataclasses before hydra sees them.
"""

import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import hydra
from omegaconf import DictConfig

from aligner.config.load import Root, load_config
from aligner.config.parse import field_types, unknown_key
from aligner.config.run import RunConfig
from aligner.errors import AlignerError, ConfigError


def launch(
    fit: Callable[[Root], None],
    conf_dir: Path,
    config_name: str,
    root: type[Root] = RunConfig,  # type: ignore[assignment]
) -> None:
    """Compose ``conf_dir/config_name`` with the command line, validate it and call ``fit``.

    ``root`` is what the configuration describes.

    An ``AlignerError`` ends the process with status 2 and its message instead of a traceback;
    set ``HYDRA_FULL_ERROR=1`` to see the traceback.
    """

    _quiet_imports()

    def main(config: DictConfig) -> None:
        _report_errors(lambda: fit(load_config(config, root)))

    _report_errors(lambda: check_overrides(sys.argv[1:], root))
    hydra.main(version_base="1.3", config_path=str(conf_dir.resolve()), config_name=config_name)(
        main
    )()


def _quiet_imports() -> None:
    """Silence what megatron-core and NeMo say at import about packages they can do without.

    The start-up report says which optional packages are missing and what that disables.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|nemo)\.")
    warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine|cuda_graph_scope).*")
    logging.getLogger("nv_one_logger").setLevel(logging.ERROR)


def check_overrides(arguments: Sequence[str], root: type = RunConfig) -> None:
    """Refuse ``key=value`` arguments whose key no dataclass has, suggesting the nearest."""
    for argument in arguments:
        key, separator, _ = argument.partition("=")
        key = key.lstrip("+~")
        if argument.startswith("-") or not separator or key.startswith("hydra"):
            continue
        if "@" in key or "/" in key:  # a choice of a config group
            continue
        check_key(key, root)


def check_key(key: str, root: type = RunConfig) -> None:
    """Refuse a dotted key that is not in the tree of dataclasses below ``root``."""
    level: Any = root
    prefix = ""
    for name in key.split("."):
        level = _dataclass_of(level)
        if level is None:  # below a free-form mapping
            return
        hints = field_types(level)
        if name not in hints:
            raise ConfigError(unknown_key(f"{prefix}.{name}".lstrip("."), list(hints), prefix))
        prefix = f"{prefix}.{name}".lstrip(".")
        level = hints[name]


def _dataclass_of(hint: Any) -> type | None:
    if get_origin(hint) in (Union, UnionType, Annotated):
        found = (_dataclass_of(arm) for arm in get_args(hint))
        return next((arm for arm in found if arm is not None), None)
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def _report_errors(action: Callable[[], None]) -> None:
    try:
        action()
    except AlignerError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
