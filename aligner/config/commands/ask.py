"""Commands that ask a model and train nothing: answers to prompts, a chat, an evaluation."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import StrictBool, StrictStr

from aligner.config.algorithms.trainer import ProcessConfig, RSTrainerConfig
from aligner.config.cluster import ClusterConfig
from aligner.config.data import AnsweredColumns, DataConfig, PromptSourceConfig
from aligner.config.environment import EnvironmentConfig
from aligner.config.experiment import ExpManagerConfig
from aligner.config.fields import (
    Count,
    FilePath,
    Function,
    Integer,
    Natural,
    Seconds,
    SpecialTokensInText,
    not_empty,
)
from aligner.config.generation import GenerationConfig
from aligner.config.reward import RewardConfig
from aligner.config.roles.model import RSModelConfig
from aligner.config.roles.peft import PeftConfig
from aligner.config.roles.policy import BackendConfig, check_policy_backend
from aligner.config.roles.sampling import PolicyRSConfig
from aligner.config.rules.cluster import check_cluster
from aligner.config.rules.environment import check_environment
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

    restore_from_path: Annotated[
        StrictStr, not_empty("a .nemo file, a Hugging Face directory or the directory of a run")
    ]
    """A `.nemo`, a Hugging Face directory, or the directory of a run: its newest state."""

    tokenizer: FilePath | None = None
    """Path of another tokenizer; null: the model's own."""

    tensor_model_parallel_size: Count = 1
    """Processes that share every layer."""

    pipeline_model_parallel_size: Count = 1
    """Processes that hold a run of layers each."""

    context_parallel_size: Count = 1
    """Processes that share every sequence, in chunks."""

    expert_model_parallel_size: Count = 1
    """Processes that share the experts of a mixture of experts."""

    sequence_parallel: StrictBool = False
    """Shard norms over the tensor-parallel processes."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """Format of 8-bit matrix products, on GPUs with Transformer Engine.

    `e4m3`, `hybrid`, or null (none).
    """


@dataclass(frozen=True)
class AskedDataConfig(AnsweredColumns):
    """Prompts, and how a row becomes one."""

    prompts: PromptSourceConfig | None = None
    """A set of prompts, with `source`, `arguments` and `limit`; null: none."""

    sets: Mapping[str, PromptSourceConfig] = field(default_factory=dict)
    """Further sets of prompts, `NAME: {source, arguments, limit}`."""


@dataclass(frozen=True)
class ServedDataConfig:
    """Prompts of requests."""

    system_prompt: StrictStr | None = None
    """Put before chat messages that bring none; null: nothing."""

    chat_template_kwargs: Mapping[StrictStr, Any] = field(default_factory=dict)
    """Variables for the chat template, as `{enable_thinking: false}`; it must name each.

    The request's own `chat_template_kwargs` go before them.
    """

    special_tokens_in_text: SpecialTokensInText = "keep"
    """Special and added tokens that requests spell: `keep`, `refuse`, or `escape` with U+200B."""

    add_bos: StrictBool = False
    """Begin with the BOS token, unless the text already does."""


@dataclass(frozen=True)
class ServerConfig:
    """Address of a server, and what requests can take of it."""

    host: Annotated[StrictStr, not_empty("an address to listen on")] = "127.0.0.1"
    """Address to listen on; `0.0.0.0`: all of the machine's."""

    port: Annotated[Integer, Interval(ge=0, le=65535)] = 8000
    """Port; 0: any that is free."""

    token_env: StrictStr | None = None
    """Environment variable that holds the bearer token; null: none."""

    token_file: FilePath | None = None
    """Or a file that holds it, written with a new one where there is none.

    With neither a new token is made and printed.
    """

    model_name: Annotated[StrictStr, not_empty("a name")] | None = None
    """Name of the model in requests; null: that of its file or directory."""

    max_waiting: Count = 1024
    """Answers that may wait; further requests are asked to come later."""

    timeout_s: Seconds = 600.0
    """Longest wait of a request for its whole answer, in seconds."""

    session_idle_s: Seconds = 3600.0
    """A session that nobody used for so long, in seconds, is forgotten and its key refused."""


@dataclass(frozen=True, kw_only=True)
class AskConfig:
    """Options of every command that generates from a model."""

    model: AskedModelConfig
    sampling: AnswerSamplingConfig = field(default_factory=AnswerSamplingConfig)
    seed: Natural = 1234
    """Seed of sampling."""

    trainer: ProcessConfig = field(default_factory=ProcessConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    policy: BackendConfig = field(default_factory=BackendConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def as_dict(self) -> dict[str, Any]:
        """The whole tree as JSON has it: mappings, lists and plain values."""
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True, kw_only=True)
class PromptedConfig(AskConfig):
    """Options of commands that read prompts."""

    data: AskedDataConfig = field(default_factory=AskedDataConfig)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(AskConfig):
    """All options of serving a model over HTTP."""

    data: ServedDataConfig = field(default_factory=ServedDataConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(PromptedConfig):
    """All options of generating."""

    prompt: tuple[StrictStr, ...] = ()
    """Prompts on the command line, beside `data.prompts`: `--prompt TEXT`."""

    chat: StrictBool = False
    """A conversation in the terminal instead: `--chat`."""

    output: FilePath | None = None
    """A `.jsonl` file to write: `--output FILE`; null: answers are printed."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(PromptedConfig):
    """All options of an evaluation."""

    reward: RewardConfig
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    final_answer: Function = FINAL_ANSWER
    """Function that finds a response's final answer.

    It is given the text and returns None where there is no answer; maj@k compares the answers.
    """

    output: FilePath = "results/evaluation"
    """Directory of evaluation.json, answers.jsonl and report.html."""

    samples_shown: Count = 12
    """Answers of each set on the page."""


def check_ask(config: AskConfig) -> None:
    """Refuse combinations that cannot work, before anything is loaded."""
    sampling = config.sampling
    if sampling.min_length > sampling.max_length:
        raise ConfigError(
            f"sampling.min_length={sampling.min_length} is more than "
            f"sampling.max_length={sampling.max_length}; lower the one or raise the other"
        )
    _check_unread(config)
    if isinstance(config, PromptedConfig):
        _check_prompted(config)
    elif sampling.samples_per_prompt != 1:
        raise ConfigError(
            f"sampling.samples_per_prompt={sampling.samples_per_prompt}: a request says how many "
            "answers it wants (n); set it to 1"
        )


def _check_prompted(config: PromptedConfig) -> None:
    sampling = config.sampling
    check_samples_differ("sampling", sampling.samples_per_prompt, sampling.use_greedy)
    check_sets("data.sets", config.data.sets)
    if isinstance(config, EvaluateConfig):
        _check_room(config)
    if isinstance(config, GenerateConfig):
        _check_generate(config)
    elif config.data.prompts is None and not config.data.sets:
        raise ConfigError(
            "data.prompts.source: not given, and no data.sets; name a .jsonl or .parquet file or a "
            "generator function (package.module:function)"
        )


def _check_room(config: EvaluateConfig) -> None:
    environment, response = config.environment, config.sampling.max_length
    if environment.is_set and environment.max_tokens <= response:
        raise ConfigError(
            f"environment.max_tokens={environment.max_tokens} leaves no room for a prompt before a "
            f"response of sampling.max_length={response}; raise the one, or lower the other"
        )


def _check_unread(config: AskConfig) -> None:
    """Refuse settings of training runs, which nothing here reads."""
    for key, given, default in (
        ("trainer.max_time", config.trainer.max_time, None),
        ("generation.async_rollouts", config.generation.async_rollouts, False),
        ("generation.in_flight", config.generation.in_flight, "finish"),
    ):
        if given != default:
            shown, kept = (json.dumps(one).strip('"') for one in (given, default))
            raise ConfigError(
                f"{key}={shown} is of training runs, and nothing is trained here; set it to {kept}"
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
    sampling_options, rows = config.sampling.sampling_options, config.sampling.batch_size
    layout = dataclasses.asdict(config.model)
    layout |= {"restore_from_path": restore_from_path, "peft": peft}
    layout["tokenizer"] = config.model.tokenizer or tokenizer
    reward, folder = RewardConfig(function=FINAL_ANSWER), "."  # nobody asks it
    environment = EnvironmentConfig()
    if isinstance(config, EvaluateConfig):
        reward, folder, environment = config.reward, config.output, config.environment
    process = {one.name: getattr(config.trainer, one.name) for one in fields(ProcessConfig)}
    data: dict[str, Any] = {}
    source = None
    if isinstance(config, PromptedConfig):
        data = dataclasses.asdict(config.data)
        del data["prompts"], data["sets"]
        source = config.data.prompts
    run = RSRunConfig(
        model=RSModelConfig(
            **layout,
            rs=PolicyRSConfig(
                num_rollout_samples=rows,
                num_rollouts_per_prompt=1,
                rollout_micro_batch_size=rows,
                length_params=sampling_options.length,
                sampling_params=sampling_options.sampling,
            ),
        ),
        trainer=RSTrainerConfig(**process),
        seed=config.seed,
        cluster=config.cluster,
        policy=config.policy,
        generation=config.generation,
        reward=reward,
        environment=environment,
        data=DataConfig(train=source or PromptSourceConfig(source=""), **data),
        exp_manager=ExpManagerConfig(explicit_log_dir=folder),
    )
    check_policy_backend(run.policy.backend, run.model)
    check_cluster(run)
    check_generation(run)
    if isinstance(config, EvaluateConfig):
        check_reward(run)
        check_environment(run)
    return run
