"""Rewards from a reward model, which may share the critic's workers, and a verifier's metrics."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from aligner.config import TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import on_all_workers, phase, run_on_all, scored_rows
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.reward.reward_model import REWARD_COLUMNS, RewardModel, RewardScorer
from aligner.models.value.lm_value import Value
from aligner.models.value.workers.value_worker import ValueWorker
from aligner.rewards.function.runner import Reward, ScoredResponses
from aligner.rewards.interface import RewardInterface, rated_responses
from aligner.rewards.sequences import SequenceEncoder, scored_texts


class SharedBackboneReward:
    """Scores sequences in the critic's workers, which hold the reward model's weights meanwhile."""

    def __init__(
        self, value: Value, config: TrainedModelConfig, tokenizer: Tokenizer, run: RunSettings
    ) -> None:
        """Load the reward model ``config.restore_from_path`` in the critic's workers."""
        self.worker_group, self.model = value.worker_group, config
        run_on_all(self.worker_group, ValueWorker.share_backbone, config, tokenizer, run)
        self.attributes = self.reward_attributes()

    prepare_for_inference = phase(ValueWorker.prepare_for_inference)
    finish_inference = phase(ValueWorker.finish_inference)
    get_rewards = scored_rows(RewardScorer.get_rewards, REWARD_COLUMNS)
    reward_attributes = on_all_workers(RewardScorer.reward_attributes)


@dataclass(eq=False)
class ModelReward:
    """Scores the responses of a rollout with a reward model on the run's workers."""

    model: RewardModel | SharedBackboneReward
    encoder: SequenceEncoder  # tokenizes texts for the reward model
    tokenizer: Tokenizer  # of the policy
    _: KW_ONLY
    weights: Tensor | None  # float32 [K] for the model's K attributes, None for a single score
    micro_batch_size: int  # sequences per forward pass, per data-parallel rank
    end_strings: Sequence[str] = ()  # the policy's stop strings, removed before scoring

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Score every response of a rollout batch, with the columns of `Reward.get_rewards`."""
        responses, texts = scored_texts(self.tokenizer, data, self.end_strings)
        # Encode with the reward model's tokenizer, and score in inference mode.
        pairs = zip(data["prompts"], texts, strict=True)
        batch = self.encoder.collate([self.encoder.ids(prompt, text) for prompt, text in pairs])
        self.model.prepare_for_inference()
        scores = self.model.get_rewards(batch, self.micro_batch_size)["rewards"].cpu()
        self.model.finish_inference()
        attributes, source = self.model.attributes, "the reward model"
        return rated_responses(
            responses, scores, attributes, self.weights, prompts=data["prompts"], source=source
        )


@dataclass(eq=False)
class VerifiedReward:
    """Rewards of a model or server, and metrics of a verifier, which do not affect training.

    The verifier's reward is reported as ``reward_parts/verified``. If the verifier returns no
    ``accuracy``, this metric is 1 for verifier rewards of at least 1, else 0. If both have a metric
    NAME, the metric of the model or server is reported as ``reward_parts/rated_NAME``.
    """

    reward: RewardInterface
    verifier: Reward

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Score every response with both. Return the rewards of ``reward``, and all metrics."""
        scored, checked = self.reward.get_rewards(data), self.verifier.get_rewards(data)
        verified = checked.rewards.tolist()
        parts = {
            "accuracy": [float(reward >= 1) for reward in verified],
            **checked.parts,
            "verified": verified,
        }
        for name, values in scored.parts.items():
            parts[f"rated_{name}" if name in parts else name] = values
        return ScoredResponses(scored.responses, scored.rewards, parts, checked.timeouts)
