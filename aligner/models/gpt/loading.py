"""`load_from_nemo`: any `.nemo`, or Hugging Face directory, into any role."""

from pathlib import Path
from typing import Any, TypeVar

from aligner.checkpoint.model_source import open_model
from aligner.config import ModelConfig
from aligner.data.tokenizer import Tokenizer
from aligner.errors import CheckpointNotFoundError
from aligner.models.gpt.megatron import MegatronGPTModel
from aligner.models.gpt.settings import RoleSettings, RunFacts, policy_settings

Role = TypeVar("Role", bound=MegatronGPTModel)


def load_from_nemo(
    cls: type[Role],
    cfg: RoleSettings | ModelConfig | None = None,
    trainer: Any = None,
    strict: bool = True,
    *,
    restore_path: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> Role:
    """Build ``cls`` from a `.nemo` file, or from a Hugging Face directory or `.gguf` file.

    Args:
        cls: the role; it, not the file's ``target``, decides what is built.
        cfg: settings of the role, or a run's ``model`` section; None: inference on one process.
        trainer: a Lightning trainer to attach; ours need none.
        strict: refuse a file that brings a head of another shape; the body is always strict.
        restore_path: the file; default ``cfg.restore_from_path``.
        tokenizer: use this one instead of the file's.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: the file is damaged, foreign or does not fit.
    """
    settings = policy_settings(cfg, RunFacts()) if isinstance(cfg, ModelConfig) else cfg
    path = restore_path or (cfg.restore_from_path if isinstance(cfg, ModelConfig) else None)
    if path is None:
        raise CheckpointNotFoundError(
            "model.restore_from_path: not given; name a .nemo file (make one with "
            "examples/convert_hf_to_nemo.py)"
        )
    with open_model(path) as checkpoint:
        return cls.from_checkpoint(
            checkpoint, settings=settings, trainer=trainer, strict=strict, tokenizer=tokenizer
        )
