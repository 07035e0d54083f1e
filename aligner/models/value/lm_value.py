"""`ValueWorker`, one process of a critic, and `Value`, which starts and calls the workers."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.nemo.archive import path_given_by
from aligner.config import CriticConfig, TrainedModelConfig
from aligner.config.roles.policy import check_policy_backend
from aligner.config.translation.nemo_rl import PublishedRole
from aligner.data.tokenizers.loading import as_tokenizer
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.interfaces import Cluster
from aligner.distributed.named_sharding import NamedSharding
from aligner.distributed.workers import scored_rows
from aligner.errors import ConfigError
from aligner.models.gpt.role.model import ValueModel
from aligner.models.gpt.role.settings import (
    RunSettings,
    critic_settings,
    reward_settings,
    settings_to_continue,
)
from aligner.models.handle import RoleHandle
from aligner.models.interfaces import ValueInterface
from aligner.models.reward.reward_model import RewardScorer
from aligner.models.worker import RoleWorker, note_unused, passes_over, place_of, read_published
from aligner.parallel.groups import ParallelState

if TYPE_CHECKING:  # a handle's process need not import the models
    from aligner.models.gpt.megatron.critic import MegatronGPTCriticModel
    from aligner.models.gpt.megatron.reward import SharedBackboneRewardModel

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


class DTensorValueWorkerV2(ValueWorker):
    """Worker of `Value` on a transformers model, sharded by FSDP2."""

    model_path = "aligner.models.gpt.dtensor.critic:DTensorCriticModel"


class MegatronValueWorker(RewardScorer, ValueWorker):
    """Worker of `Value` on megatron-core. A reward model can use the critic's modules."""

    model_path = "aligner.models.gpt.megatron.critic:MegatronGPTCriticModel"
    model: "MegatronGPTCriticModel"
    _reward: "SharedBackboneRewardModel | None" = None

    def share_backbone(
        self, config: TrainedModelConfig, tokenizer: Tokenizer, run: RunSettings
    ) -> None:
        """See `ValueWorker.share_backbone`."""
        from aligner.models.gpt.megatron.reward import SharedBackboneRewardModel

        settings = reward_settings(config, run, learns=False)
        with open_model(config.restore_from_path) as checkpoint:
            self._reward = SharedBackboneRewardModel.in_critic(
                self.model, checkpoint, settings=settings, tokenizer=tokenizer
            )

    @property
    def reward_model(self) -> "SharedBackboneRewardModel":
        """Reward model that `share_backbone` loaded."""
        assert self._reward is not None, "call share_backbone first"
        return self._reward

    def enable_forward_pre_hook(self) -> None:
        """From the next update on, gather each weight in the forward pass that reads it.

        This method has an effect only in training with several data-parallel workers.
        """
        if self.model.optimizer is not None:
            self.model.optimizer.defer_weight_gather()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Undo `enable_forward_pre_hook`. ``param_sync``: also gather the weights now."""
        if self.model.optimizer is None:
            return
        if self.model.settings.overlap_param_gather:  # configured, not set by a caller
            if param_sync:
                self.model.collect_weights()
            return
        self.model.optimizer.gather_weights_after_updates(param_sync)

    def _gather_weights(self) -> None:
        self.disable_forward_pre_hook()


MegatronValueWorkerImpl = MegatronValueWorker  # NeMo-RL's class without Ray


VALUE_COLUMNS = ("input_ids", "input_lengths")


class Value(RoleHandle, ValueInterface):
    """A critic that predicts the return from every token on, and trains on returns."""

    workers: ClassVar[Mapping[str, str]] = {
        "megatron": "aligner.models.value.lm_value.MegatronValueWorker",
        "dtensor": "aligner.models.value.lm_value.DTensorValueWorkerV2",
    }

    def __init__(
        self,
        cluster: Cluster,
        config: CriticConfig | Mapping[str, Any],
        tokenizer: Tokenizer,
        name_prefix: str = "lm_value",
        workers_per_node: int | Sequence[int] | None = None,
        init_optimizer: bool = True,
        weights_path: str | os.PathLike[str] | None = None,
        optimizer_path: str | os.PathLike[str] | None = None,
        *,
        model: TrainedModelConfig | None = None,
        run: RunSettings | None = None,
        backend: str = "megatron",
    ) -> None:
        """Start the workers on ``cluster``.

        They load ``weights_path``, by default ``config.restore_from_path``, by default the policy's
        weights with a new head. ``config``: the critic's section of a configuration, which requires
        ``model``, or a mapping with the keys of `ValueConfig`. ``model``: the policy's section,
        whose micro-batch settings and, unless ``config`` sets a layout, layout are used. For the
        other arguments and the errors see `Policy`.
        """
        self.cfg = config
        config, section, run, published = read_critic(config, model, run)
        backend = backend if published is None else published.backend
        check_policy_backend(backend, section)
        super().__init__(
            cluster,
            config,
            section,
            name_prefix,
            backend,
            weights_path,
            optimizer_path,
            parallel=section.parallel,
            workers_per_node=workers_per_node,
            env_vars=None if published is None else published.env_vars,
            model=section,
            tokenizer=as_tokenizer(tokenizer),
            run=run,
            init_optimizer=init_optimizer,
        )

    get_values = scored_rows(ValueWorker.get_values, VALUE_COLUMNS)
