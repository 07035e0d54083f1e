"""Inputs of a run that samples: prompts, environments, the reward and the sampling engine."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor

from aligner.algorithms.rollout.environments import EnvironmentReward
from aligner.algorithms.rollout.kinds import EnvironmentKind
from aligner.algorithms.rollout.rollout import RolloutSource
from aligner.algorithms.run.dry_run import MadeUpRewards
from aligner.algorithms.run.engine import Engine, Workers, run_settings
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import check_room, dropped_note, role_memory
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.nemo.archive import path_given_by
from aligner.config import (
    AskedDataConfig,
    DataConfig,
    DynamicBatchingConfig,
    EngineStart,
    PromptSourceConfig,
    RewardModelConfig,
    RunConfig,
    SamplingRunConfig,
    SequencePackingConfig,
    TrainedModelConfig,
    check_layout,
)
from aligner.config.parse import refuse
from aligner.data.dataset import Split
from aligner.data.prompts import EpisodeDataset, PromptDataset
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.models.gpt.role.reward import rated_attributes
from aligner.models.interfaces import GenerationInterface
from aligner.models.policy.lm_policy import Policy
from aligner.models.reward.reward_model import RewardModel
from aligner.models.value.lm_value import Value
from aligner.observe.startup import RoleMemory
from aligner.rewards.function.runner import Reward
from aligner.rewards.interface import RewardInterface, check_weights
from aligner.rewards.model import ModelReward, SharedBackboneReward, VerifiedReward
from aligner.rewards.sequences import SequenceEncoder

# Options of an architecture that do not affect the layers below the head of a trained model.
_NON_BODY_FIELDS = {"attention_dropout", "family", "hidden_dropout", "init_std", "tie_embeddings"}


@dataclass(frozen=True)
class Prompts(Split[PromptDataset]):
    """Training and validation prompts of a run. ``sets``: additional validation sets."""

    sets: Mapping[str, PromptDataset] = field(default_factory=dict)

    @property
    def max_length(self) -> int:
        """Length of the longest prompt of all sets, in tokens."""
        return max([super().max_length, *(prompts.max_length for prompts in self.sets.values())])

    @property
    def held_out(self) -> dict[str, PromptDataset]:
        """All validation sets, by the prefix of the metrics."""
        sets = {} if self.validation is None else {"val_rollouts": self.validation}
        return {**sets, **{f"val_sets/{name}": prompts for name, prompts in self.sets.items()}}

    def notes(self) -> list[str]:
        """Return notes for the start-up report, about dropped prompts and shared prompts."""
        dropped = self.train.dropped_too_long
        return [
            *super().notes(),
            *dropped_note(dropped, "training prompts", "data.max_prompt_length"),
            *shared_note(self.train, self.validation),
        ]


def load_prompts(run: Run[SamplingRunConfig]) -> Prompts:
    """Read and tokenize the prompts of a run. Raises if the model lacks positions for responses."""
    config, data = run.config, run.config.data
    if config.environment.is_set:
        refuse(config.length_problems(max_context(config, run.architecture)))
    load = prompt_loader(config, data, run.tokenizer, run.architecture)
    prompts = Prompts(
        load(data.train),
        None if data.validation is None else load(data.validation),
        {name: load(source) for name, source in config.validation.sets.items()},
    )
    if config.environment.is_set:
        return prompts
    # Prompt and response must fit the model's positions. Validation may have longer responses.
    key, lengths = f"{config.model.rollout_key}.length_params", config.model.rollout.length_params
    validation_sets, max_response = prompts.held_out.values(), config.validation.max_length
    for dataset in (prompts.train, *validation_sets):
        refuse(config.length_problems(dataset.max_length))
        longest = dataset.max_length
        check_room(run.architecture, longest, f"{key}.max_length", lengths.max_length)
    if max_response is not None:
        for dataset in validation_sets:
            check_room(run.architecture, dataset.max_length, "validation.max_length", max_response)
    return prompts


def prompt_loader(
    config: SamplingRunConfig,
    data: DataConfig | AskedDataConfig,
    tokenizer: Tokenizer,
    architecture: GPTArchitecture,
) -> Callable[[PromptSourceConfig], PromptDataset]:
    """Return a function that reads prompts from a source, or data rows with an environment."""
    if not config.environment.is_set:
        return lambda source: PromptDataset.load(source, tokenizer, data)
    max_length = max_context(config, architecture)
    truth = data.ground_truth_column
    return lambda source: EpisodeDataset.read(source, max_length, truth, data)


def max_context(config: SamplingRunConfig, architecture: GPTArchitecture) -> int:
    """Return the maximum length of a conversation before a response, in tokens."""
    environment, positions = config.environment, architecture.max_position_embeddings
    if environment.max_tokens > positions:
        raise ConfigError(
            f"environment.max_tokens={environment.max_tokens}, but the model has {positions} "
            "positions. Lower environment.max_tokens"
        )
    return environment.max_tokens - config.model.rollout.length_params.max_length


def open_environments(
    config: SamplingRunConfig,
    tokenizer: Tokenizer,
    architecture: GPTArchitecture,
    columns: Mapping[str, str | None],
    closing: ExitStack,
) -> RolloutSource | None:
    """Start the configured environments, until ``closing`` closes. Return their rollout source.

    Returns None if no environment is configured, and in a dry run, which samples single responses
    of the length of a conversation. ``columns``: result of `columns_of_rows`. Raises `ConfigError`
    if the environment's class, function or program is missing or does not accept the columns.
    """
    if not config.environment.is_set or config.dry_run:
        return None
    kind: type[EnvironmentKind] = config.environment.kind_class
    return kind.open(config, tokenizer, architecture, columns, closing)


def shared_note(train: PromptDataset, validation: PromptDataset | None) -> list[str]:
    """Return a list with a note if some validation prompts are also training prompts, else []."""
    if validation is None or isinstance(train, EpisodeDataset):
        return []
    trained = {tuple(train[index].ids) for index in range(len(train))}
    count = sum(tuple(validation[index].ids) in trained for index in range(len(validation)))
    text = (
        f"{count} of {len(validation)} validation prompts are training prompts as well: "
        "validation overestimates the accuracy"
    )
    return [text] if count else []


def start_generation(
    config: SamplingRunConfig, workers: Workers, policy: Policy, longest_prompt: int
) -> GenerationInterface | None:
    """Start separate sampling engines. Returns None if the policy's workers sample."""
    engine = config.generation.engine
    if engine is None:
        return None
    # Engines reserve memory for the longest sequence of training and validation.
    response = max(config.model.rollout.length_params.max_length, config.validation.max_length or 0)
    clusters, length = workers.clusters, longest_prompt + response
    start = EngineStart(
        clusters.generation, config, workers.tokenizer, workers.architecture, policy, length
    )
    return workers.own(engine.start(start))


@dataclass(frozen=True)
class RewardSource:
    """Reward of a run, loaded before any model is built. `start` returns the reward itself."""

    config: SamplingRunConfig
    tokenizer: Tokenizer  # the policy's
    scorer: RewardInterface | None  # a function or server, None if a model has to be started
    verifier: Reward | None  # a function in addition to a model or a server
    # Description of the reward model, if any.
    architecture: GPTArchitecture | None = None
    encoder: SequenceEncoder | None = None
    weights: Tensor | None = None  # float32 [attributes], or None if the model has one reward

    def start(self, workers: Workers, value: Value | None = None) -> RewardInterface:
        """Start the reward model, if any, and return the reward. A dry run calls only the model."""
        model = None if self.encoder is None else self._start_model(self.encoder, workers, value)
        if self.config.dry_run:
            return MadeUpRewards(model, self.config.seed)
        scorer = self.scorer or model
        assert scorer is not None, "a source must have a scorer or a model"
        return scorer if self.verifier is None else VerifiedReward(scorer, self.verifier)

    def notes(self) -> list[str]:
        """Return notes about the reward function for the start-up report."""
        parts = (self.scorer, self.verifier)
        return [note for part in parts if isinstance(part, Reward) for note in part.notes()]

    def memory(self) -> list[RoleMemory]:
        """Return the memory per process of a reward model with its own workers, else []."""
        model = self.config.reward.model
        if self.architecture is None or (model is not None and model.share_body_with_critic):
            return []
        return [role_memory(self.config, self.architecture, 1, "reward model", trainable=False)]

    def _start_model(
        self, encoder: SequenceEncoder, workers: Workers, value: Value | None
    ) -> ModelReward:
        config, model = self.config, self.config.reward.model
        assert model is not None, "checked with the configuration"
        frozen, run = frozen_config(config.model, model), run_settings(config)
        handle: RewardModel | SharedBackboneReward
        if model.share_body_with_critic:
            assert value is not None, "checked with the configuration"
            handle = SharedBackboneReward(value, frozen, encoder.tokenizer, run)
        else:
            handle = RewardModel(
                workers.clusters.reward,
                frozen,
                encoder.tokenizer,
                run,
                init_optimizer=False,
                offload_weights=model.offload_weights,
            )
            workers.own(handle)
        # The policy's responses are decoded and encoded for the reward model.
        return ModelReward(
            handle,
            encoder,
            self.tokenizer,
            weights=self.weights,
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
    """Load the configured reward: a function, a server, or the description of a reward model."""
    reward, rollout = config.reward, config.model.rollout
    if reward.kind == "environment":
        return RewardSource(config, tokenizer, EnvironmentReward(), None)
    # Load the function. It is the reward, or verifies responses that a model or a server scores.
    function = None
    if reward.function is not None:
        function = Reward.load(reward, tokenizer)
        closing.callback(function.shutdown)
        function.check_columns(columns)
    if reward.kind == "function":
        return RewardSource(config, tokenizer, function, None)
    # Connect to a server.
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
    # Describe a model, and check its head and the layout.
    model, path = reward.model, reward.model.restore_from_path
    with path_given_by("reward.model.restore_from_path"), open_model(path) as checkpoint:
        attributes = rated_attributes(checkpoint, path)
        architecture = checkpoint.architecture
        encoder = SequenceEncoder.of_checkpoint(checkpoint, model.add_bos)
    weights = check_weights(reward.attribute_weights, attributes, path)
    check_layout(architecture, config.model.parallel, model.workers or engine.worlds[0])
    if model.share_body_with_critic:
        check_one_body(config, architecture)
    return RewardSource(config, tokenizer, None, function, architecture, encoder, weights)


def check_one_body(config: SamplingRunConfig, architecture: GPTArchitecture) -> None:
    """Raise `ConfigError` unless reward model and critic have equal layers below the head."""
    assert isinstance(config, RunConfig), "checked with the configuration"
    assert config.critic is not None, "checked with the configuration"
    assert config.reward.model is not None, "checked with the configuration"
    key, path = "critic.restore_from_path", config.critic.restore_from_path
    if path is None:
        key, path = "model.restore_from_path", config.model.restore_from_path
    with open_model(path) as checkpoint:
        body = checkpoint.architecture
    # Compare all fields that affect layers below the head.
    differing = [
        f"{name} ({getattr(architecture, name)}, {getattr(body, name)})"
        for name in (option.name for option in dataclasses.fields(GPTArchitecture))
        if name not in _NON_BODY_FIELDS and getattr(architecture, name) != getattr(body, name)
    ]
    if differing:
        raise ConfigError(
            "reward.model.share_body_with_critic=true, but reward.model.restore_from_path="
            f"{config.reward.model.restore_from_path} and {key}={path} differ in "
            f"{', '.join(differing)}. Start both from one model, or set share_body_with_critic="
            "false"
        )


def frozen_config(policy: TrainedModelConfig, model: RewardModelConfig) -> TrainedModelConfig:
    """Return the configuration of a frozen reward model, with the policy's parallel layout."""
    return TrainedModelConfig(
        restore_from_path=model.restore_from_path,
        micro_batch_size=model.micro_batch_size,
        sequence_packing=SequencePackingConfig(enabled=False),
        dynamic_batching=DynamicBatchingConfig(enabled=False),
        **{
            option.name: getattr(policy, option.name)
            for option in dataclasses.fields(TrainedModelConfig)
            if option.name.endswith(("_parallel_size", "_pipeline_stage"))
            or option.name in ("sequence_parallel", "fp8", "layer_spec", "fusions")
        },
    )
