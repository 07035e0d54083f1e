"""`load_from_nemo`: any `.nemo`, or Hugging Face directory, into any role."""

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
    """Build ``cls`` from a `.nemo` file, or from a Hugging Face directory or `.gguf` file.

    Args:
        cls: the role; it, not the file's ``target``, decides what is built.
        cfg: a run's ``model`` (or ``critic``) section as hydra has it, as a mapping or typed; or
            the settings of the role; None: inference on one process.
        trainer: a Lightning trainer to attach, whose precision and gradient clipping go with a
            section; ours need none.
        strict: refuse a file that brings a head of another shape; the body is always strict.
        restore_path: the file; default ``cfg.restore_from_path``.
        tokenizer: use this one instead of the file's.

    Raises:
        ConfigError: a key or a value of ``cfg`` that the role does not have.
        CheckpointNotFoundError: there is no such file.
        CheckpointError: the file is damaged, foreign or does not fit.
    """
    settings: RoleSettings | None = None
    path = restore_path
    if isinstance(cfg, RoleSettings):
        settings = cfg
    elif cfg is not None:
        section = run_section(cfg, cls.config_types, restore_path)
        settings = settings_of_section(section, trainer)
        path = restore_path or section.restore_from_path
    if path is None:
        raise CheckpointNotFoundError(
            "model.restore_from_path: not given; name a .nemo file (make one with "
            "examples/convert_hf_to_nemo.py)"
        )
    with open_model(path) as checkpoint:
        return cls.from_checkpoint(
            checkpoint, settings=settings, trainer=trainer, strict=strict, tokenizer=tokenizer
        )
