"""Rewards of a rollout from a reward model, also on the critic's backbone; a verifier beside."""

from collections.abc import Sequence

from torch import Tensor

from aligner.config import TrainedModelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import on_all_workers, phase, run_on_all, scored_rows
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.reward.reward_model import REWARD_COLUMNS, RewardModel
from aligner.models.reward.workers.reward_worker import RewardScorer
from aligner.models.value.lm_value import Value
from aligner.models.value.workers.value_worker import ValueWorker
from aligner.rewards.interface import Reward, RewardInterface, ScoredResponses, rated_responses
from aligner.rewards.sequences import SequenceEncoder, response_texts, scored_texts


class SharedBackboneReward:
    """Scores whole sequences, as `RewardModel` does, with weights that are swapped in."""

    def __init__(
        self, value: Value, config: TrainedModelConfig, tokenizer: Tokenizer, run: RunSettings
    ) -> None:
        """Have the critic's workers load ``config.restore_from_path`` beside their own weights.

        ``config``: how sequences are cut into micro-batches, as for a separate reward model.
        """
        self.worker_group, self.model = value.worker_group, config
        run_on_all(self.worker_group, ValueWorker.share_backbone, config, tokenizer, run)
        self.attributes = self.reward_attributes()

    prepare_for_inference = phase(ValueWorker.prepare_for_inference)
    finish_inference = phase(ValueWorker.finish_inference)
    get_rewards = scored_rows(RewardScorer.get_rewards, REWARD_COLUMNS)
    reward_attributes = on_all_workers(RewardScorer.reward_attributes)


class ModelReward:
    """Scores responses with a reward model on the run's workers.

    Args:
        model: the handle; it only scores.
        encoder: texts to the model's sequences.
        tokenizer: the policy's.
        weights: float32 [K] of the K attributes that the model rates; None: it gives one number.
        micro_batch_size: sequences per forward pass, per data-parallel rank.
        end_strings: the policy's stop strings, which no reward model was shown.
    """

    def __init__(
        self,
        model: RewardModel | SharedBackboneReward,
        encoder: SequenceEncoder,
        tokenizer: Tokenizer,
        *,
        weights: Tensor | None,
        micro_batch_size: int,
        end_strings: Sequence[str] = (),
    ) -> None:
        self.model, self.encoder, self.tokenizer = model, encoder, tokenizer
        self.weights, self.micro_batch_size = weights, micro_batch_size
        self.end_strings = end_strings

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Score every row; columns as in `Reward.get_rewards`."""
        responses = response_texts(self.tokenizer, data)
        texts = scored_texts(self.tokenizer, data, responses, self.end_strings)
        pairs = zip(data["prompts"], texts, strict=True)
        batch = self.encoder.collate([self.encoder.ids(prompt, text) for prompt, text in pairs])
        self.model.prepare_for_inference()
        scores = self.model.get_rewards(batch, self.micro_batch_size)["rewards"].cpu()
        self.model.finish_inference()
        return rated_responses(
            responses,
            scores,
            self.model.attributes,
            self.weights,
            prompts=data["prompts"],
            source="the reward model",
        )


class VerifiedReward:
    """Rewards of one source, beside a function that verifies how often they are deserved.

    The function's ``accuracy`` (where it gives none, whether its reward is at least 1) becomes the
    metric of that name, its reward ``reward_parts/verified``. Neither is trained on. Where the
    source rates something under a name that the verifier has, too, its number is
    ``reward_parts/rated_<name>``.
    """

    def __init__(self, reward: RewardInterface, verifier: Reward) -> None:
        self.reward, self.verifier = reward, verifier

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Score every row with both."""
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
