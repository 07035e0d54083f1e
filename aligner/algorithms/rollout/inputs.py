"""Inputs of a run that samples: prompts, environments and the sampling engine."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from aligner.algorithms.rollout.rollout import RolloutSource
from aligner.algorithms.run.dry_run import longest_set
from aligner.algorithms.run.engine import Workers
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import check_lengths, check_room, dropped_note
from aligner.architecture import GPTArchitecture
from aligner.config import (
    AskedDataConfig,
    DataConfig,
    EngineStart,
    PromptSourceConfig,
    SamplingRunConfig,
)
from aligner.config.parse import refuse
from aligner.data.dataset import PromptSampler, Split
from aligner.data.prompts import EpisodeDataset, PromptDataset, columns_of_rows
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.models.interfaces import GenerationInterface
from aligner.models.policy.lm_policy import Policy


@dataclass(frozen=True)
class Prompts(Split[PromptDataset]):
    """Prompts of a run. ``sets`` are the named additional validation sets."""

    sets: Mapping[str, PromptDataset] = field(default_factory=dict)

    @property
    def max_length(self) -> int:
        """Length of the longest prompt of all sets, in tokens."""
        return max([super().max_length, *(prompts.max_length for prompts in self.sets.values())])

    @property
    def held_out(self) -> dict[str, PromptDataset]:
        """All validation sets. The keys are the prefixes of their metrics."""
        sets = {} if self.validation is None else {"val_rollouts": self.validation}
        return {**sets, **{f"val_sets/{name}": prompts for name, prompts in self.sets.items()}}

    def sampler(self, config: SamplingRunConfig) -> PromptSampler:
        """Return the sampler that draws the training prompts of each step."""
        rollout = config.model.rollout
        return PromptSampler(
            len(self.train),
            rollout.num_rollout_samples // rollout.num_rollouts_per_prompt,
            seed=config.seed,
            shuffle=config.data.shuffle,
            may_change=config.exp_manager.data_may_change,
            shares=self.train.shares,
        )

    def notes(self) -> list[str]:
        """Return notes on dropped prompts and prompts in both sets for the start-up report."""
        dropped = self.train.dropped_too_long
        return [
            *super().notes(),
            *dropped_note(dropped, "training prompts", "data.max_prompt_length"),
            *shared_note(self.train, self.validation),
        ]


def load_prompts(run: Run[SamplingRunConfig]) -> Prompts:
    """Read and tokenize the prompts of a run, and check that responses fit after them."""
    config, data = run.config, run.config.data
    if config.environment.is_set:
        refuse(config.length_problems(longest_opening(config, run.architecture)))
    load = prompt_loader(config, data, run.tokenizer, run.architecture)
    prompts = Prompts(
        load(data.train),
        None if data.validation is None else load(data.validation),
        {name: load(source) for name, source in config.validation.sets.items()},
    )
    if config.environment.is_set:
        return prompts
    # Every prompt leaves room for a response, validation prompts for a validation response, too.
    validation_sets = prompts.held_out.values()
    for dataset in (prompts.train, *validation_sets):
        check_lengths(config, run.architecture, dataset.max_length)
    max_response = config.validation.max_length
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
    """Return a function that reads a source into a dataset.

    The rows are prompts or, if the run has an environment, the first rows of conversations.
    """
    if not config.environment.is_set:
        return lambda source: PromptDataset.load(source, tokenizer, data)
    max_length = longest_opening(config, architecture)
    truth = data.ground_truth_column
    return lambda source: EpisodeDataset.read(source, max_length, truth, data)


def longest_opening(config: SamplingRunConfig, architecture: GPTArchitecture) -> int:
    """Return the maximum number of prompt tokens with which a response fits, in any turn."""
    environment, positions = config.environment, architecture.max_position_embeddings
    if environment.max_tokens > positions:
        raise ConfigError(
            f"environment.max_tokens={environment.max_tokens}, but the model has {positions} "
            "positions. Lower max_tokens"
        )
    return environment.max_tokens - config.model.rollout.length_params.max_length


def load_environments(run: Run[SamplingRunConfig], prompts: Prompts) -> RolloutSource | None:
    """Start the environments of a run until the run ends (see `open_environments`)."""
    sets = {"data.train": prompts.train, "data.validation": prompts.validation}
    sets |= {f"validation.sets.{name}": prompts for name, prompts in prompts.sets.items()}
    columns = columns_of_rows(sets)
    return open_environments(run.config, run.tokenizer, run.architecture, columns, run.closing)


def open_environments(
    config: SamplingRunConfig,
    tokenizer: Tokenizer,
    architecture: GPTArchitecture,
    columns: Mapping[str, str | None],
    closing: ExitStack,
) -> RolloutSource | None:
    """Start the environments, with processes on rank 0. Return their rollout source.

    Return None if the run has no environment, and in a dry run, which samples single responses of
    the maximum length of a conversation instead. ``columns``: see `columns_of_rows`. ``closing``
    ends the environments.

    Raises:
        ConfigError: the class or function cannot be imported or does not accept the columns, or
            the command's program does not exist.
    """
    environment = config.environment
    if not environment.is_set or config.dry_run:
        return None
    rollouts: RolloutSource = environment.kind_class.open(
        config, tokenizer, architecture, columns, closing
    )
    return rollouts


def of_dry_run(run: Run[SamplingRunConfig], prompts: Prompts) -> Prompts:
    """Return ``prompts``, or for a dry run generated prompts of the maximum length."""
    if not run.config.dry_run:
        return prompts
    return Prompts(longest_set(run.config, prompts.train, run.tokenizer, run.architecture))


def shared_note(train: PromptDataset, validation: PromptDataset | None) -> list[str]:
    """Return a note if validation prompts are also training prompts."""
    if validation is None or isinstance(train, EpisodeDataset):
        return []
    trained = {tuple(train[index].ids) for index in range(len(train))}
    count = sum(tuple(validation[index].ids) in trained for index in range(len(validation)))
    if not count:
        return []
    return [
        f"{count} of {len(validation)} validation prompts are training prompts as well: "
        "validation overestimates the accuracy"
    ]


def start_generation(
    config: SamplingRunConfig, workers: Workers, policy: Policy, longest_prompt: int
) -> GenerationInterface | None:
    """Start the engines that sample for the policy, or return None if its workers sample."""
    engine = config.generation.engine
    if engine is None:
        return None
    # Engines reserve memory for the longest sequence of training and validation.
    response = max(config.model.rollout.length_params.max_length, config.validation.max_length or 0)
    return workers.own(
        engine.start(
            EngineStart(
                workers.clusters.generation,
                config,
                workers.tokenizer,
                workers.architecture,
                policy,
                longest_prompt + response,
            )
        )
    )
