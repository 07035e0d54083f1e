"""Commands that ask a model and train nothing: answers to prompts, a chat, an evaluation."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from aligner.config.algorithms.trainer import ProcessConfig, RSTrainerConfig
from aligner.config.cluster import ClusterConfig
from aligner.config.data import DataConfig, PromptSourceConfig
from aligner.config.experiment import ExpManagerConfig
from aligner.config.fields import Count, FilePath, Function, Natural, NotEmpty
from aligner.config.generation import GenerationConfig
from aligner.config.reward import RewardConfig
from aligner.config.roles.model import PolicyRSConfig, RSModelConfig
from aligner.config.roles.peft import PeftConfig
from aligner.config.roles.policy import BackendConfig, check_policy_backend
from aligner.config.rules.cluster import check_cluster
from aligner.config.rules.generation import check_generation
from aligner.config.rules.reward import check_reward
from aligner.config.run import RSRunConfig
from aligner.config.validation import (
    FINAL_ANSWER,
    AnswerSamplingConfig,
    check_samples_differ,
    check_sets,
)
from aligner.errors import ConfigError


@dataclass(frozen=True)
class AskedModelConfig:
    """A model that is only asked, and its layout."""

    # A .nemo file, a Hugging Face directory, or the directory of a run: its newest state.
    restore_from_path: Annotated[
        str, NotEmpty("a .nemo file, a Hugging Face directory or the directory of a run")
    ]
    tokenizer: FilePath | None = None  # path of another tokenizer; null: the model's own
    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    context_parallel_size: Count = 1
    expert_model_parallel_size: Count = 1
    sequence_parallel: bool = False  # shard norms over the tensor-parallel group
    fp8: Literal["e4m3", "hybrid"] | None = None  # 8-bit products, with Transformer Engine


@dataclass(frozen=True)
class AskedDataConfig:
    """Prompts, and how a row becomes one."""

    prompts: PromptSourceConfig | None = None  # .jsonl, .parquet or .txt files, or a generator
    # Further sets by name, each with source, arguments and limit.
    sets: Mapping[str, PromptSourceConfig] = field(default_factory=dict)
    prompt_column: str = "prompt"  # text, or a list of chat messages
    ground_truth_column: str | None = "ground_truth"  # null: the data has none
    tools_column: str | None = "tools"  # functions that a chat's assistant may call; null: none
    chat: bool = False  # plain text becomes a user message; messages always use the template
    system_prompt: str | None = None  # put before chat messages that have none
    add_bos: bool = False  # begin with the BOS token, unless the text already does
    max_prompt_length: Count | None = None  # tokens; longer prompts are dropped and counted


@dataclass(frozen=True, kw_only=True)
class AskConfig:
    """Options of every command that generates from a model."""

    model: AskedModelConfig
    data: AskedDataConfig = field(default_factory=AskedDataConfig)
    sampling: AnswerSamplingConfig = field(default_factory=AnswerSamplingConfig)
    seed: Natural = 1234  # of sampling
    trainer: ProcessConfig = field(default_factory=ProcessConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    policy: BackendConfig = field(default_factory=BackendConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def as_dict(self) -> dict[str, Any]:
        """The whole tree as JSON has it: mappings, lists and plain values."""
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(AskConfig):
    """All options of generating."""

    prompt: tuple[str, ...] = ()  # prompts on the command line, beside data.prompts
    chat: bool = False  # a conversation in the terminal instead
    output: FilePath | None = None  # a .jsonl file to write; null: answers are printed


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(AskConfig):
    """All options of an evaluation."""

    reward: RewardConfig
    # What answers of maj@k are compared by: a function from a response's text to its final answer.
    final_answer: Function = FINAL_ANSWER
    # Directory: evaluation.json, answers.jsonl, report.html.
    output: FilePath = "results/evaluation"
    samples_shown: Count = 12  # answers of each set on the page


def check_ask(config: AskConfig) -> None:
    """Refuse combinations that cannot work, before anything is loaded."""
    sampling = config.sampling
    check_samples_differ("sampling", sampling.samples_per_prompt, sampling.use_greedy)
    check_sets("data.sets", config.data.sets)
    if sampling.min_length > sampling.max_length:
        raise ConfigError(
            f"sampling.min_length={sampling.min_length} is more than "
            f"sampling.max_length={sampling.max_length}; lower the one or raise the other"
        )
    _check_unread(config)
    if isinstance(config, GenerateConfig):
        _check_generate(config)
    elif config.data.prompts is None and not config.data.sets:
        raise ConfigError(
            "data.prompts.source: not given, and no data.sets; name a .jsonl or .parquet file or a "
            "generator function (package.module:function)"
        )


def _check_unread(config: AskConfig) -> None:
    """Refuse settings of training runs, which nothing here reads."""
    for key, given, default in (
        ("trainer.max_time", config.trainer.max_time, None),
        ("generation.async_rollouts", config.generation.async_rollouts, False),
        ("generation.in_flight", config.generation.in_flight, "finish"),
    ):
        if given != default:
            told, kept = (json.dumps(one).strip('"') for one in (given, default))
            raise ConfigError(
                f"{key}={told} is of training runs, and nothing is trained here; set it to {kept}"
            )


def _check_generate(config: GenerateConfig) -> None:
    asked = bool(config.prompt) or config.data.prompts is not None or bool(config.data.sets)
    if config.chat and (asked or config.output is not None):
        raise ConfigError(
            "chat=true is a conversation in the terminal; leave out prompt, data.prompts, "
            "data.sets and output"
        )
    if config.chat and config.cluster.engine == "local" and config.trainer.world_size > 1:
        raise ConfigError(
            f"chat=true with {config.trainer.world_size} processes: each would wait for the "
            "terminal; set trainer.devices=1, or cluster.engine=ray"
        )
    if not config.chat and not asked:
        raise ConfigError(
            "nothing is asked: give --prompt TEXT, data.prompts.source=FILE, or --chat"
        )


def as_run(
    config: AskConfig, restore_from_path: str, peft: PeftConfig, tokenizer: str | None = None
) -> RSRunConfig:
    """The run, of no step, that engines, roles and rewards are built for.

    ``restore_from_path``, ``peft`` and ``tokenizer``: the model's, where ``config`` names a run.
    """
    drawing, rows = config.sampling.drawing, config.sampling.batch_size
    layout = dataclasses.asdict(config.model)
    layout |= {"restore_from_path": restore_from_path, "peft": peft}
    layout["tokenizer"] = config.model.tokenizer or tokenizer
    reward, folder = RewardConfig(function=FINAL_ANSWER), "."  # nobody asks it
    if isinstance(config, EvaluateConfig):
        reward, folder = config.reward, config.output
    process = {one.name: getattr(config.trainer, one.name) for one in fields(ProcessConfig)}
    data = dataclasses.asdict(config.data)
    del data["prompts"], data["sets"]
    run = RSRunConfig(
        model=RSModelConfig(
            **layout,
            rs=PolicyRSConfig(
                num_rollout_samples=rows,
                num_rollouts_per_prompt=1,
                rollout_micro_batch_size=rows,
                length_params=drawing.length,
                sampling_params=drawing.sampling,
            ),
        ),
        trainer=RSTrainerConfig(**process),
        seed=config.seed,
        cluster=config.cluster,
        policy=config.policy,
        generation=config.generation,
        reward=reward,
        data=DataConfig(train=config.data.prompts or PromptSourceConfig(source=""), **data),
        exp_manager=ExpManagerConfig(explicit_log_dir=folder),
    )
    check_policy_backend(run.policy.backend, run.model)
    check_cluster(run)
    check_generation(run)
    if isinstance(config, EvaluateConfig):
        check_reward(run)
    return run
