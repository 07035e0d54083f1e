"""Inputs of a run that samples: its prompts, and the engine that answers them."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from aligner.algorithms.rollout.rollout import RolloutSource
from aligner.algorithms.run.dry_run import longest_set
from aligner.algorithms.run.engine import Workers
from aligner.algorithms.run.run import Run
from aligner.algorithms.run.startup import check_lengths, check_room, dropped_note
from aligner.architecture import GPTArchitecture
from aligner.config import EngineStart, SamplingRunConfig
from aligner.config.parse import refuse
from aligner.data.dataset import PromptSampler, Split
from aligner.data.prompts import EpisodeDataset, PromptDataset, columns_of_rows
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.models.interfaces import GenerationInterface
from aligner.models.policy.lm_policy import Policy


@dataclass(frozen=True)
class Prompts(Split[PromptDataset]):
    """Prompts of a run; ``sets``: further ones for validation, by name."""

    sets: Mapping[str, PromptDataset] = field(default_factory=dict)

    @property
    def max_length(self) -> int:
        """Length of the longest prompt of all sets, in tokens."""
        return max([super().max_length, *(each.max_length for each in self.sets.values())])

    @property
    def held_out(self) -> dict[str, PromptDataset]:
        """Every set for validation by the prefix of its metrics."""
        own = {} if self.validation is None else {"val_rollouts": self.validation}
        return {**own, **{f"val_sets/{name}": prompts for name, prompts in self.sets.items()}}

    def sampler(self, config: SamplingRunConfig) -> PromptSampler:
        """Sampler of the training prompts of each step."""
        rollout = config.model.rollout
        return PromptSampler(
            len(self.train),
            rollout.num_rollout_samples // rollout.num_rollouts_per_prompt,
            seed=config.seed,
            shuffle=config.data.shuffle,
            may_change=config.exp_manager.data_may_change,
        )

    def notes(self) -> list[str]:
        """Prompts that were dropped, or are in both sets, for the start-up report."""
        dropped = self.train.dropped_too_long
        return [
            *dropped_note(dropped, "training prompts", "data.max_prompt_length"),
            *shared_note(self.train, self.validation),
        ]


def load_prompts(run: Run[SamplingRunConfig]) -> Prompts:
    """Read and tokenize the prompts of a run, and check that responses fit behind them."""
    config, data = run.config, run.config.data
    if config.environment.is_set:
        return _load_episodes(run)
    both = Split.load(PromptDataset, data, run.tokenizer)
    sets = {
        name: PromptDataset.load(source, run.tokenizer, data)
        for name, source in config.validation.sets.items()
    }
    held_out = [*sets.values()] if both.validation is None else [both.validation, *sets.values()]
    for prompts in (both.train, *held_out):
        check_lengths(config, run.architecture, prompts.max_length)
    response = config.validation.max_length
    if response is not None:
        for prompts in held_out:
            check_room(run.architecture, prompts.max_length, "validation.max_length", response)
    return Prompts(both.train, both.validation, sets)


def _load_episodes(run: Run[SamplingRunConfig]) -> Prompts:
    """Rows of a run over conversations; a prompt may be as long as leaves room for a response."""
    config = run.config
    longest = longest_opening(config, run.architecture)
    refuse(config.length_problems(longest))
    held_out, truth = config.data.validation, config.data.ground_truth_column
    return Prompts(
        EpisodeDataset.read(config.data.train, longest, truth),
        None if held_out is None else EpisodeDataset.read(held_out, longest, truth),
        {
            name: EpisodeDataset.read(source, longest, truth)
            for name, source in config.validation.sets.items()
        },
    )


def longest_opening(config: SamplingRunConfig, architecture: GPTArchitecture) -> int:
    """Tokens that a prompt of a conversation may have, of any turn: a response fits behind it."""
    environment, positions = config.environment, architecture.max_position_embeddings
    if environment.max_tokens > positions:
        raise ConfigError(
            f"environment.max_tokens={environment.max_tokens}: the model has {positions} "
            "positions; lower it"
        )
    return environment.max_tokens - config.model.rollout.length_params.max_length


def load_environments(run: Run[SamplingRunConfig], prompts: Prompts) -> RolloutSource | None:
    """The environments of a run; see `open_environments`. They end with the run."""
    further = {f"validation.sets.{name}": each for name, each in prompts.sets.items()}
    own = {"data.train": prompts.train, "data.validation": prompts.validation}
    columns = columns_of_rows({**own, **further})
    return open_environments(run.config, run.tokenizer, run.architecture, columns, run.closing)


def open_environments(
    config: SamplingRunConfig,
    tokenizer: Tokenizer,
    architecture: GPTArchitecture,
    columns: Mapping[str, str | None],
    closing: ExitStack,
) -> RolloutSource | None:
    """Environments, their processes started on rank 0; None: the configuration has none.

    ``columns``: of `columns_of_rows`. ``closing`` ends them. A dry run has none: its responses are
    as long as a conversation may be.

    Raises:
        ConfigError: the class or function cannot be imported, or cannot be made of the columns, or
            the command's program is not there.
    """
    environment = config.environment
    if not environment.is_set or config.dry_run:
        return None
    rollouts: RolloutSource = environment.kind_class.open(
        config, tokenizer, architecture, columns, closing
    )
    return rollouts


def of_dry_run(run: Run[SamplingRunConfig], prompts: Prompts) -> Prompts:
    """Prompts of a dry run, of the greatest length in place of ``prompts``; else ``prompts``."""
    if not run.config.dry_run:
        return prompts
    return Prompts(longest_set(run.config, prompts.train, run.tokenizer, run.architecture))


def shared_note(train: PromptDataset, validation: PromptDataset | None) -> list[str]:
    """Note that validation prompts are learned from, too; empty where none is."""
    if validation is None or isinstance(train, EpisodeDataset):
        return []
    learned = {tuple(train[index].ids) for index in range(len(train))}
    count = sum(tuple(validation[index].ids) in learned for index in range(len(validation)))
    if not count:
        return []
    return [
        f"{count} of {len(validation)} validation prompts are training prompts, too: what "
        "validation says of them is no news"
    ]


def start_generation(
    config: SamplingRunConfig, workers: Workers, policy: Policy, longest_prompt: int
) -> GenerationInterface | None:
    """The engines that sample for the policy; None where its own workers do."""
    engine = config.generation.engine
    if engine is None:
        return None
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


def generation_note(generation: GenerationInterface) -> list[str]:
    """Device settings of the engines, for the start-up report."""
    return [*filter(None, [generation.in_words()])]
