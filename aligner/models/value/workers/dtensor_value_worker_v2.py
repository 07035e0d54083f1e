"""One process's share of a critic on a transformers model, as FSDP2 and DTensors."""

from aligner.checkpoint.model_source import open_model
from aligner.config import CriticConfig, ModelConfig
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.parallel import ParallelState
from aligner.models.gpt.dtensor_critic import DTensorCriticModel
from aligner.models.gpt.settings import RunFacts, critic_settings
from aligner.models.value.workers.value_worker import ValueWorker


class DTensorValueWorkerV2(ValueWorker[DTensorCriticModel]):
    """Loads the critic's body (the policy's, by default) and serves `Value`.

    Args:
        config: the critic's section.
        model: the policy's; its layout is the critic's.
        tokenizer: packaged when the critic is saved.
        run: what all roles share.
        parallel: this process's place.
        weights_path: load these weights and this head instead of what ``config`` names.
        optimizer_path: continue from this optimizer state, a directory of `save_checkpoint`.
        init_optimizer: False for a critic that only predicts.
        max_optimizer_steps: what a schedule without ``max_steps`` decays over.
    """

    def __init__(
        self,
        config: CriticConfig,
        model: ModelConfig,
        tokenizer: Tokenizer,
        run: RunFacts,
        parallel: ParallelState,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        max_optimizer_steps: int | None = None,
    ) -> None:
        settings = critic_settings(config, model, run, max_optimizer_steps)
        path = weights_path or config.restore_from_path or model.restore_from_path
        with open_model(path) as source:
            critic = DTensorCriticModel(source, settings, parallel, tokenizer)
        super().__init__(critic, parallel, config, init_optimizer, optimizer_path)

    def num_parameters(self) -> int:
        """Parameters of the whole role."""
        return self.model.num_parameters()
