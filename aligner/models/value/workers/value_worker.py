"""`ValueWorker`, one process of a critic."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from aligner.checkpoint.nemo.archive import path_given_by
from aligner.config import CriticConfig, TrainedModelConfig
from aligner.config.translation.nemo_rl import PublishedRole
from aligner.data.tokenizers.loading import as_tokenizer
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.named_sharding import NamedSharding
from aligner.errors import ConfigError
from aligner.models.gpt.role.model import ValueModel
from aligner.models.gpt.role.settings import RunSettings, critic_settings, settings_to_continue
from aligner.models.worker import RoleWorker, note_unused, passes_over, place_of, read_published
from aligner.parallel.groups import ParallelState

if TYPE_CHECKING:  # a handle's process need not import the models
    pass

TokenizerType = TypeVar("TokenizerType", bound=Tokenizer)  # name in NeMo-RL


def read_critic(
    config: CriticConfig | Mapping[str, Any],
    model: TrainedModelConfig | None,
    run: RunSettings | None,
) -> tuple[CriticConfig, TrainedModelConfig, RunSettings, PublishedRole | None]:
    """Return the critic's section, the policy's section with the critic's layout, and run settings.

    ``config``: a section (requires ``model``), or NeMo-RL's mapping, which is also returned parsed.
    """
    published = None if isinstance(config, CriticConfig) else read_published(config, "value")
    if published is not None:
        config, model, run = published.critic, published.model, run or RunSettings.of(published)
    assert isinstance(config, CriticConfig)
    if model is None:
        raise ConfigError(
            "model=None: a CriticConfig does not contain all settings. Pass the policy's section "
            "as model"
        )
    return config, config.with_layout(model), run or RunSettings(), published


class ValueWorker(RoleWorker[ValueModel]):
    """Worker of `Value`. It loads the critic's model, by default the policy's with a new head.

    For the arguments see `Value` and `PolicyWorker`.
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
        run: RunSettings | None = None,
        parallel: ParallelState | None = None,
        **kwargs: Any,
    ) -> None:
        note_unused(type(self).__name__, kwargs)
        config, model, run, _ = read_critic(config, model, run)
        parallel = place_of(model.parallel, worker_sharding_annotations, parallel, run.seed)
        tokenizer = as_tokenizer(tokenizer)
        # Load the model. Errors about the file contain the key of its path.
        body_path = config.restore_from_path or model.restore_from_path
        settings = critic_settings(config, model, run)
        own_body = config.restore_from_path is not None and weights_path is None
        with path_given_by("critic.restore_from_path" if own_body else "model.restore_from_path"):
            settings, whole_path = settings_to_continue(settings, weights_path)
            critic = self.load_model(settings, whole_path or body_path, tokenizer)
        super().__init__(
            critic,
            parallel,
            offloads=config.offload_weights,
            init_optimizer=init_optimizer,
            optimizer_path=optimizer_path,
        )

    def get_values(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """Compute ``values`` float32 [B, S]. Column t is the value of the tokens before token t.

        Values are 0 at t = 0 and from a row's length on. Reads ``input_ids`` int64 [B, S] and
        ``input_lengths`` int64 [B]. ``micro_batch_size``: number of sequences per forward pass.
        """
        values = self.model.get_values(*passes_over(data, micro_batch_size))
        return BatchedDataDict({"values": values})

    def share_backbone(
        self, config: TrainedModelConfig, tokenizer: Tokenizer, run: RunSettings
    ) -> None:
        """Load a reward model into host memory. To score, the critic's modules get its weights."""
        raise ConfigError(
            "reward.model.share_body_with_critic=true is not supported by policy.backend=dtensor. "
            "Set policy.backend=megatron, or reward.model.share_body_with_critic=false"
        )
