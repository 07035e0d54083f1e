"""One process's share of a reward model on megatron-core."""

from aligner.models.gpt.megatron.reward import MegatronGPTRewardModel
from aligner.models.reward.workers.reward_worker import RewardWorker


class MegatronRewardWorker(RewardWorker):
    """Worker of `RewardModel` on this backend."""

    model_class = MegatronGPTRewardModel
