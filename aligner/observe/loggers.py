"""Mirrors of the metrics: Lightning's TensorBoard and W&B loggers."""

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aligner.observe.metrics import Logger

_log = logging.getLogger(__name__)


def make_loggers(
    folder: Path,
    *,
    restored_step: int | None = None,
    tensorboard: bool = True,
    wandb: bool = False,
    wandb_options: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[Logger]:
    """The loggers that the configuration asks for and that are installed. Imports them now.

    Args:
        folder: directory of the run; events go to ``tensorboard/`` and ``wandb/`` below it.
        restored_step: TensorBoard hides what an interrupted run wrote after this step.
        wandb_options: arguments of Lightning's ``WandbLogger`` (project, name, offline, …).
        config: shown by W&B beside the curves.
    """
    loggers: list[Logger] = []
    if tensorboard and _installed("tensorboard", "TensorBoard curves"):
        from lightning.fabric.loggers import TensorBoardLogger

        purge = None if restored_step is None else restored_step + 1
        board = TensorBoardLogger(folder, name="tensorboard", version="", purge_step=purge)
        loggers.append(board)
    if wandb and _installed("wandb", "W&B logging"):
        from lightning.pytorch.loggers import WandbLogger

        options = {"save_dir": folder, "id": _wandb_id(folder), "resume": "allow"}
        mirror = WandbLogger(**{**options, **(wandb_options or {})})
        if config is not None:
            mirror.log_hyperparams(dict(config))
        loggers.append(mirror)
    return loggers


def _installed(package: str, purpose: str) -> bool:
    if importlib.util.find_spec(package) is None:
        _log.warning("%s is not installed: no %s (pip install %s)", package, purpose, package)
        return False
    return True


def _wandb_id(folder: Path) -> str:
    """Identifier of this directory's run, kept in a file so that a resumed run is the same one."""
    import secrets

    path = folder / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()
