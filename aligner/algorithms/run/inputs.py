"""Fast checks of a command's files, before torch is imported."""

import ast
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aligner.algorithms.run.identity import flat, module_file
from aligner.checkpoint.nemo.archive import ArchiveReader, path_given_by
from aligner.data.readers import source_files
from aligner.errors import ConfigError
from aligner.importing import load_function
from aligner.rewards.function.execution import LoadedFunction

_PATHS = (".restore_from_path", ".explicit_log_dir", ".source", ".tokenizer")


def check_inputs(config: Any) -> None:
    """Check that the models, data files and reward function of a configuration exist.

    Raises `CheckpointNotFoundError`, `DataError` or `ConfigError` for wrong models, files or names.
    """
    values = flat(config.as_dict())
    for key, value in values.items():
        # Check the length of each path.
        paths = [value] if isinstance(value, str) else value
        for path in paths if paths and key.endswith(_PATHS) else ():
            # Linux cannot open longer paths, nor longer names in a path.
            names = [os.fsencode(name) for name in path.split("/")]
            if max(map(len, names)) > 255 or len(os.fsencode(path)) > 4095:
                raise ConfigError(
                    f"{key}={path[:60]!r}…: the path has {len(os.fsencode(path))} bytes. Use at "
                    "most 4095 bytes, and at most 255 bytes between two slashes"
                )
        # Check that models and data files exist.
        if key.endswith(".restore_from_path") and value and not Path(value).exists():
            with path_given_by(key):
                ArchiveReader(value)  # raises
        elif value and re.fullmatch(r"(data|validation\.sets)\.(sets\.)?[^.]+\.source", key):
            for source in paths:
                source_files(source)
    reward: Any = getattr(config, "reward", None)
    if reward is not None and isinstance(reward.function, str):
        _check_signature(reward.function, reward.kwargs)


def _check_signature(name: str, kwargs: Mapping[str, Any]) -> None:
    """Check the parameters of a reward function in its source, without running the file."""
    module, _, function = name.rpartition(":" if ":" in name else ".")
    file = Path(module).expanduser() if module.endswith(".py") else module_file(module)
    if not file.is_file():
        load_function(name, key="reward.function")  # raises, or finds a module without a file
        return
    try:
        statements = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return  # the reward process reports the error with its traceback
    for node in statements:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name == function and not node.decorator_list:
            LoadedFunction(_without_body(node), name, kwargs)


def _without_body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Callable[..., Any]:
    """Return a function with the parameters of ``node``, whose defaults are all None."""
    parameters = node.args
    for parameter in ast.walk(parameters):
        if isinstance(parameter, ast.arg):
            parameter.annotation = None
    parameters.defaults = [ast.Constant(None) for _ in parameters.defaults]
    parameters.kw_defaults = [default and ast.Constant(None) for default in parameters.kw_defaults]
    expression = ast.Expression(ast.Lambda(parameters, ast.Constant(None)))
    code = compile(ast.fix_missing_locations(expression), "<signature>", "eval")
    result: Callable[..., Any] = eval(code)
    return result
