"""One process's share of a reward model on a transformers model, as FSDP2."""

from aligner.models.gpt.dtensor.critic import DTensorRewardModel
from aligner.models.reward.workers.reward_worker import RewardWorker


class DTensorRewardWorker(RewardWorker):
    """Worker of `RewardModel` on this backend."""

    model_class = DTensorRewardModel
