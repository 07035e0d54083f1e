"""One process's share of a reward model on megatron-core."""

from aligner.config import TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.models.gpt.megatron.reward import MegatronGPTRewardModel
from aligner.models.gpt.role.settings import RunSettings, reward_settings, settings_to_continue
from aligner.models.reward.workers.reward_worker import RewardWorker
from aligner.parallel.groups import ParallelState


class MegatronRewardWorker(RewardWorker):
    """Worker of `RewardModel`, which loads a reward model or a language model with a new head.

    For most arguments see `RewardModel`. ``parallel``: parallel layout and groups of this process.
    ``offload_weights``: keep weights in host memory between phases.
    """

    model_class = MegatronGPTRewardModel

    def __init__(
        self,
        config: TrainedModelConfig,
        tokenizer: Tokenizer,
        run: RunSettings,
        parallel: ParallelState,
        *,
        attributes: tuple[str, ...] | None = None,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        max_optimizer_steps: int | None = None,
        offload_weights: bool = False,
    ) -> None:
        settings = reward_settings(config, run, attributes, init_optimizer, max_optimizer_steps)
        settings, whole_path = settings_to_continue(settings, weights_path)
        model = self.load_model(settings, whole_path or config.restore_from_path, tokenizer)
        super().__init__(
            model,
            parallel,
            offloads=offload_weights,
            init_optimizer=init_optimizer,
            optimizer_path=optimizer_path,
        )
        if init_optimizer:
            # Training makes the file's standardisation and form of sequences obsolete.
            model.standardization = model.sequence_form = None
