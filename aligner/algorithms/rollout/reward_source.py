"""Sources of the rewards of a run: a function, a reward model on its workers, or a server."""

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from aligner.algorithms.rollout.environments import EnvironmentReward
from aligner.algorithms.run.dry_run import MadeUpRewards
from aligner.algorithms.run.engine import Engine, Workers, run_settings
from aligner.algorithms.run.startup import role_memory
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.nemo.archive import named_by
from aligner.config import (
    DynamicBatchingConfig,
    RewardModelConfig,
    RunConfig,
    SamplingRunConfig,
    SequencePackingConfig,
    TrainedModelConfig,
    check_layout,
)
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.models.gpt.role.reward import rated_attributes
from aligner.models.reward.reward_model import RewardModel
from aligner.models.value.lm_value import Value
from aligner.observe.startup import RoleMemory
from aligner.rewards.interface import Reward, RewardInterface, check_weights
from aligner.rewards.model import ModelReward, SharedBackboneReward, VerifiedReward
from aligner.rewards.sequences import SequenceEncoder

# Options that affect a model's start, training or output layer. The critic lacks the output layer.
_NON_BODY_FIELDS = {"attention_dropout", "family", "hidden_dropout", "init_std", "tie_embeddings"}


@dataclass(frozen=True)
class RatingModel:
    """A reward model whose file is read and checked, and which is not started yet.

    ``weights`` are the weights of its attributes, [attributes], or None for a scalar reward.
    """

    architecture: GPTArchitecture
    encoder: SequenceEncoder
    weights: Tensor | None


@dataclass(frozen=True)
class RewardSource:
    """Description of the reward before any model is built.

    ``scorer`` is a function or a server that is ready to score, or None if the reward ``model`` has
    to be started. ``verifier`` is a function that is used in addition to a model or a server.
    """

    config: SamplingRunConfig
    tokenizer: Tokenizer  # of the policy
    scorer: RewardInterface | None
    verifier: Reward | None
    model: RatingModel | None = None

    def start(self, workers: Workers, value: Value | None = None) -> RewardInterface:
        """Return the run's reward. A reward model is started and ends with ``workers``.

        ``value`` is the critic, whose body the reward model may share. A dry run has no meaningful
        responses, so functions and servers are not called.
        """
        model = None if self.model is None else self._started(self.model, workers, value)
        if self.config.dry_run:
            return MadeUpRewards(model, self.config.seed)
        scorer = self.scorer or model
        assert scorer is not None, "a source must have a scorer or a model"
        return scorer if self.verifier is None else VerifiedReward(scorer, self.verifier)

    def notes(self) -> list[str]:
        """Return notes on the function for the start-up report."""
        functions = (self.scorer, self.verifier)
        return [
            text
            for function in functions
            if isinstance(function, Reward)
            for text in function.notes()
        ]

    def memory(self) -> list[RoleMemory]:
        """Return the memory of a reward model per process, empty without a separate body."""
        model = self.config.reward.model
        if self.model is None or (model is not None and model.share_body_with_critic):
            return []
        architecture = self.model.architecture
        return [role_memory(self.config, architecture, 1, "reward model", trainable=False)]

    def _started(self, rating: RatingModel, workers: Workers, value: Value | None) -> ModelReward:
        """Start the frozen reward model, on workers in the policy's layout or in ``value``'s."""
        config, model = self.config, self.config.reward.model
        assert model is not None, "checked with the configuration"
        frozen, run = frozen_config(config.model, model), run_settings(config)
        # The handle of the workers: the critic's, or separate ones.
        handle: RewardModel | SharedBackboneReward
        if model.share_body_with_critic:
            assert value is not None, "checked with the configuration"
            handle = SharedBackboneReward(value, frozen, rating.encoder.tokenizer, run)
        else:
            handle = workers.own(
                RewardModel(
                    workers.clusters.reward,
                    frozen,
                    rating.encoder.tokenizer,
                    run,
                    init_optimizer=False,
                    offload_weights=model.offload_weights,
                )
            )
        # The policy's responses are decoded and encoded for the reward model.
        return ModelReward(
            handle,
            rating.encoder,
            self.tokenizer,
            weights=rating.weights,
            micro_batch_size=model.micro_batch_size,
            end_strings=config.model.rollout.sampling_params.end_strings,
        )


def load_reward(
    config: SamplingRunConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    columns: frozenset[str],
    closing: ExitStack,
) -> RewardSource:
    """Load the source of rewards: import a function, query a server, or read a model's header.

    ``columns`` are the data's columns for the function. ``closing`` ends the function's processes.
    """
    reward, rollout = config.reward, config.model.rollout
    if reward.kind == "environment":
        return RewardSource(config, tokenizer, EnvironmentReward(), None)
    # A function is the reward, or verifies in addition to a model or a server.
    function = None
    if reward.function is not None:
        function = Reward.load(reward, tokenizer)
        closing.callback(function.shutdown)
        function.check_columns(columns)
    if reward.kind == "function":
        return RewardSource(config, tokenizer, function, None)
    if reward.server is not None:
        from aligner.rewards.server.client import RemoteReward  # imports httpx

        remote = RemoteReward(
            reward.server,
            tokenizer,
            weights=reward.attribute_weights,
            end_strings=rollout.sampling_params.end_strings,
        )
        return RewardSource(config, tokenizer, remote, function)
    assert reward.model is not None, "checked with the configuration"
    model = _rating_model(config, reward.model, engine)
    return RewardSource(config, tokenizer, None, function, model)


def _rating_model(
    config: SamplingRunConfig, model: RewardModelConfig, engine: Engine
) -> RatingModel:
    """Read a reward model's file. The model must have a head and fit the layout."""
    path = model.restore_from_path
    with named_by("reward.model.restore_from_path"), open_model(path) as checkpoint:
        attributes = rated_attributes(checkpoint, path)
        architecture = checkpoint.architecture
        encoder = SequenceEncoder.of_checkpoint(checkpoint, model.add_bos)
    weights = check_weights(config.reward.attribute_weights, attributes, path)
    check_layout(architecture, config.model.parallel, model.workers or engine.worlds[0])
    if model.share_body_with_critic:
        check_one_body(config, architecture)
    return RatingModel(architecture, encoder, weights)


def check_one_body(config: SamplingRunConfig, architecture: GPTArchitecture) -> None:
    """Raise if the reward model's weights do not fit into the critic's body."""
    assert isinstance(config, RunConfig), "checked with the configuration"
    assert config.critic is not None, "checked with the configuration"
    key, path = "critic.restore_from_path", config.critic.restore_from_path
    if path is None:
        key, path = "model.restore_from_path", config.model.restore_from_path
    with open_model(path) as checkpoint:
        body = checkpoint.architecture
    # Compare all fields that affect the body.
    differing = [
        f"{field.name} ({getattr(architecture, field.name)}, {getattr(body, field.name)})"
        for field in dataclasses.fields(GPTArchitecture)
        if field.name not in _NON_BODY_FIELDS
        and getattr(architecture, field.name) != getattr(body, field.name)
    ]
    if differing:
        assert config.reward.model is not None
        raise ConfigError(
            "reward.model.share_body_with_critic=true, but reward.model.restore_from_path="
            f"{config.reward.model.restore_from_path} and {key}={path} differ in "
            f"{', '.join(differing)}. Start both from one model, or set it to false"
        )


def frozen_config(policy: TrainedModelConfig, model: RewardModelConfig) -> TrainedModelConfig:
    """Return a frozen reward model's configuration, with the layout of the policy."""
    return TrainedModelConfig(
        restore_from_path=model.restore_from_path,
        micro_batch_size=model.micro_batch_size,
        sequence_packing=SequencePackingConfig(enabled=False),
        dynamic_batching=DynamicBatchingConfig(enabled=False),
        **{
            field.name: getattr(policy, field.name)
            for field in dataclasses.fields(TrainedModelConfig)
            if field.name.endswith(("_parallel_size", "_pipeline_stage"))
            or field.name in ("sequence_parallel", "fp8", "layer_spec", "fusions")
        },
    )
