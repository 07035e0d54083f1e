"""`load_from_nemo`: builds a role from a `.nemo` file, Hugging Face directory or `.gguf` file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from aligner.checkpoint.model_source import open_model
from aligner.config import CriticConfig, TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import CheckpointNotFoundError
from aligner.models.gpt.megatron.model import MegatronGPTModel
from aligner.models.gpt.role.settings import RoleSettings, run_section, settings_of_section

Role = TypeVar("Role", bound=MegatronGPTModel)


def load_from_nemo(
    cls: type[Role],
    cfg: RoleSettings | TrainedModelConfig | CriticConfig | Mapping[str, Any] | None = None,
    trainer: Any = None,
    strict: bool = True,
    *,
    restore_path: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> Role:
    """Build the role ``cls`` from a `.nemo` file, a Hugging Face directory or a `.gguf` file.

    Args:
        cfg: section ``model`` or ``critic`` of a run's configuration (Hydra's, a mapping, or a
            dataclass), or the role's settings. None: inference on one process.
        trainer: Lightning trainer whose precision and gradient clipping complete a section.
        strict: raise if the file contains a head of another shape. Other shapes are always checked.
        restore_path: path of the file. Default: ``cfg.restore_from_path``.
        tokenizer: tokenizer that replaces the tokenizer in the file.

    Raises ConfigError for a key or value of ``cfg`` that the role does not support, and
    CheckpointError if the file does not exist, is damaged or does not fit.
    """
    settings, path = cfg, restore_path
    if settings is not None and not isinstance(settings, RoleSettings):
        section = run_section(settings, cls.config_types, restore_path)
        settings = settings_of_section(section, trainer)
        path = restore_path or section.restore_from_path
    if path is None:
        raise CheckpointNotFoundError(
            "model.restore_from_path is not set. Set it to a .nemo file (create one with "
            "examples/convert_hf_to_nemo.py)"
        )
    with open_model(path) as checkpoint:
        return cls.from_checkpoint(
            checkpoint, settings=settings, trainer=trainer, strict=strict, tokenizer=tokenizer
        )
