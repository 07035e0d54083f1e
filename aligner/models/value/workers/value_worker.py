"""One process's share of a critic, whatever it is built of."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.checkpoint.nemo.archive import named_by
from aligner.checkpoint.run_state.role_files import load_optimizer_state
from aligner.cluster.named_sharding import NamedSharding
from aligner.config import CriticConfig, TrainedModelConfig
from aligner.config.elsewhere.nemo_rl import published_role
from aligner.data.tokenizers.loading import as_tokenizer
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.parallel import ParallelState
from aligner.errors import ConfigError
from aligner.models.gpt.role.interface import CriticRole
from aligner.models.gpt.role.settings import RoleSettings, RunFacts, critic_settings
from aligner.models.role_worker import (
    RoleWorker,
    micro_batches_of,
    note_unused,
    place_of,
    tensors_on_device,
)

Critic = TypeVar("Critic", bound=CriticRole)


class ValueWorker(RoleWorker[Critic], ABC):
    """Loads the critic's body (the policy's, by default) and serves `Value`.

    Args:
        config: the critic's section, which needs ``model``; or a mapping of `ValueConfig`.
        tokenizer: packaged when the critic is saved.
        weights_path: load these weights and this head instead of what ``config`` names.
        optimizer_path: continue from this optimizer state, a directory of `save_checkpoint`.
        init_optimizer: False for a critic that only predicts.
        worker_sharding_annotations: place of every worker; must agree with ``config``.
        model: the policy's section; its layout is the critic's where that has none of its own.
        run: what all roles share; default that of the mapping.
        parallel: this process's place; default joined, by RANK and its kin in the environment.
        max_optimizer_steps: what a schedule without ``max_steps`` decays over.
        kwargs: published arguments without a counterpart; named in a warning.
    """

    def __init__(
        self,
        config: CriticConfig | Mapping[str, Any],
        tokenizer: Tokenizer,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        *,
        worker_sharding_annotations: NamedSharding | None = None,
        model: TrainedModelConfig | None = None,
        run: RunFacts | None = None,
        parallel: ParallelState | None = None,
        max_optimizer_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        note_unused(type(self).__name__, kwargs)
        if not isinstance(config, CriticConfig):
            published = published_role(config, "value")
            config, model = published.critic, published.model
            run = run or RunFacts.of(published)
        if model is None:
            raise ConfigError("model: required beside a CriticConfig; give the policy's section")
        run = run or RunFacts()
        model = config.laid_out(model)
        parallel = place_of(model.parallel, worker_sharding_annotations, parallel, run.seed)
        tokenizer = as_tokenizer(tokenizer)
        body_path = config.restore_from_path or model.restore_from_path
        settings = critic_settings(config, model, run, max_optimizer_steps)
        own_body = config.restore_from_path is not None and weights_path is None
        with named_by("critic.restore_from_path" if own_body else "model.restore_from_path"):
            critic = self.load(settings, body_path, weights_path, tokenizer, parallel)
        super().__init__(critic, parallel)
        if init_optimizer:
            self.model.setup_training()
        if optimizer_path is not None:
            load_optimizer_state(self, optimizer_path)
        self._offloads = config.offload_weights

    @staticmethod
    @abstractmethod
    def load(
        settings: RoleSettings,
        body_path: str,
        whole_path: str | None,
        tokenizer: Tokenizer,
        parallel: ParallelState,
    ) -> Critic:
        """The backend's critic, on the body at ``body_path`` or whole from ``whole_path``."""

    def get_values(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """``values`` float32 ``[B, S]``, right-shifted: of the state before each token."""
        passes = micro_batches_of(data, micro_batch_size)
        values = self.model.get_values(tensors_on_device(data), passes)
        return BatchedDataDict({"values": values})

    # Phases -----------------------------------------------------------------------------------

    def finish_training(self) -> None:
        """See `RoleWorker`; weights are whole."""
        self.disable_forward_pre_hook()
        super().finish_training()

    def prepare_for_inference(self) -> None:
        """See `RoleWorker`; weights are whole."""
        self.disable_forward_pre_hook()
        super().prepare_for_inference()

    # When weights are gathered ----------------------------------------------------------------

    def enable_forward_pre_hook(self) -> None:
        """Gather, from the next update on, each weight in the forward pass that reads it.

        Nothing to do where the backend always does.
        """

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Gather weights right after updates again, and now unless ``param_sync`` is False.

        Nothing to do where the backend never does.
        """

    def _settle(self) -> None:
        """Weights whole and on the device, whatever phase this is."""
        self.disable_forward_pre_hook()
        super()._settle()
