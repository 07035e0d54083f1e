"""NeMo's interface to this library's checkpoints: `restore_from` and `save_to` of a `ModelPT`."""

import tempfile
from pathlib import Path
from typing import Any

from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
from nemo.utils.app_state import AppState

from aligner.checkpoint.nemo.model_file import open_nemo


class GPTSaveRestoreConnector(SaveRestoreConnector):
    """Reader and writer of `.nemo` files in any parallel layout. No code in the files runs."""

    def restore_from(
        self,
        calling_cls: type[Any],  # of aligner.models.gpt.megatron
        restore_path: str,
        override_config_path: Any = None,
        map_location: Any = None,
        strict: bool = True,
        return_config: bool = False,
        trainer: Any = None,
        validate_access_integrity: bool = True,
    ) -> Any:
        """Build a model of ``calling_cls`` from a `.nemo`, on the accelerator.

        The arguments are those of NeMo's method. ``map_location`` and ``validate_access_integrity``
        have no effect. ``return_config=True`` returns the content of ``model_config.yaml``.
        """
        del map_location, validate_access_integrity
        if override_config_path is not None:
            raise NotImplementedError(
                "override_config_path is not supported, because the checkpoint determines the "
                "architecture. Pass changed settings to load_from_nemo instead"
            )
        with open_nemo(restore_path) as checkpoint:
            if return_config:
                return checkpoint.config
            folder = tempfile.TemporaryDirectory(prefix="nemo_artifacts_")
            checkpoint.extract_artifacts(Path(folder.name))
            # NeMo's ``register_artifact`` finds the files through the global state.
            state = AppState()
            previous, state.nemo_file_folder = state.nemo_file_folder, folder.name
            try:
                model = calling_cls.from_checkpoint(checkpoint, trainer=trainer, strict=strict)
            finally:
                state.nemo_file_folder = previous
            model.artifact_folder = folder  # removed with the model
            return model

    def save_to(self, model: Any, save_path: str) -> None:
        """Write the model to ``save_path`` atomically. All ranks must call this method."""
        model.save_to(save_path)
