"""Configuration of commands that only sample from a model: generate, chat, evaluate, serve."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import StrictBool, StrictStr

from aligner.config.algorithms.process import ProcessConfig
from aligner.config.algorithms.trainer import RSTrainerConfig
from aligner.config.cluster import ClusterConfig
from aligner.config.combinations import broken_rules
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
from aligner.config.parse import refuse
from aligner.config.reward import RewardConfig
from aligner.config.roles.model import ModelSourceConfig, RSModelConfig
from aligner.config.roles.peft import PeftConfig
from aligner.config.roles.policy import BackendConfig
from aligner.config.roles.sampling import PolicyRSConfig
from aligner.config.run import RSRunConfig
from aligner.config.validation import FINAL_ANSWER, AnswerSamplingConfig, answer_problems
from aligner.foreign_keys import shown
from aligner.hub import ON_HUB


@dataclass(frozen=True)
class AskedModelConfig(ModelSourceConfig):
    """A model that generates and is not trained."""

    restore_from_path: Annotated[
        StrictStr,
        not_empty("a .nemo file, a Hugging Face directory or the directory of a run"),
        ON_HUB,
    ]
    """A `.nemo`, a Hugging Face directory, or a run's directory, whose newest state is loaded."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """Format of 8-bit matrix products, on GPUs with Transformer Engine. `e4m3`, `hybrid`, or null
    (none)."""


@dataclass(frozen=True)
class AskedDataConfig(AnsweredColumns):
    """Prompts, in one set or several named sets, and the columns of their rows."""

    prompts: PromptSourceConfig | None = None
    """A set of prompts, with `source`, `arguments` and `limit`. `null` means no such set."""

    sets: Mapping[str, PromptSourceConfig] = field(default_factory=dict)
    """Additional sets of prompts, `NAME: {source, arguments, limit}`."""


@dataclass(frozen=True)
class ServedDataConfig:
    """Conversion of HTTP requests to prompts."""

    system_prompt: StrictStr | None = None
    """System message for chats without one. `null` adds none."""

    chat_template_kwargs: Mapping[StrictStr, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `{enable_thinking: false}`. The template must use
    each variable. A request's `chat_template_kwargs` take precedence."""

    special_tokens_in_text: SpecialTokensInText = "keep"
    """Special and added tokens in the text of requests: `keep`, `refuse`, or `escape` with
    U+200B."""

    add_bos: StrictBool = False
    """Begin a prompt with the BOS token, unless its text already does."""


@dataclass(frozen=True)
class ServerConfig:
    """Address, authentication and limits of a server."""

    host: Annotated[StrictStr, not_empty("an address to listen on")] = "127.0.0.1"
    """Address to listen on. `0.0.0.0` means all addresses of the machine."""

    port: Annotated[Integer, Interval(ge=0, le=65535)] = 8000
    """Port. `0` means any free port."""

    token_env: StrictStr | None = None
    """Environment variable with the bearer token. `null` means no variable."""

    token_file: FilePath | None = None
    """File with the bearer token. If the file does not exist, it is created with a new token.
    Without `token_env` and `token_file` the server creates a token and prints it."""

    model_name: Annotated[StrictStr, not_empty("a name")] | None = None
    """Name of the model in requests. `null` means the name of its file or directory."""

    max_waiting: Count = 1024
    """Maximum number of queued answers. A full queue refuses requests, which clients may retry."""

    timeout_s: Seconds = 600.0
    """Longest wait of a request for its complete answer, in seconds."""

    session_idle_s: Seconds = 3600.0
    """Seconds without a request after which a session is deleted and its key refused."""


@dataclass(frozen=True, kw_only=True)
class AskConfig:
    """Options of every command that generates from a model."""

    model: AskedModelConfig
    sampling: AnswerSamplingConfig = field(default_factory=AnswerSamplingConfig)
    seed: Natural = 1234
    """Seed of sampling."""

    download: StrictBool = False
    """Download models and data that are named as on Hugging Face's hub (docs/ppo.md#data)."""

    trainer: ProcessConfig = field(default_factory=ProcessConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    policy: BackendConfig = field(default_factory=BackendConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values: dicts, lists and scalars."""
        return json.loads(json.dumps(asdict(self)))

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for invalid length limits, and for options of training runs."""
        yield from self.sampling.problems("sampling", run)
        for option, value, default in (
            ("trainer.max_time", self.trainer.max_time, None),
            ("generation.async_rollouts", self.generation.async_rollouts, False),
            ("generation.in_flight", self.generation.in_flight, "finish"),
        ):
            if value != default:
                yield (
                    f"{option}={shown(value)} applies to training runs only. "
                    f"Set it to {shown(default)}"
                )


@dataclass(frozen=True, kw_only=True)
class PromptedConfig(AskConfig):
    """Options of commands that read prompts."""

    data: AskedDataConfig = field(default_factory=AskedDataConfig)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield the messages of `AskConfig.problems` and `answer_problems`."""
        yield from super().problems(key, run)
        samples, greedy = self.sampling.samples_per_prompt, self.sampling.use_greedy
        yield from answer_problems("sampling", samples, greedy, "data.sets", self.data.sets)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(AskConfig):
    """All options of the command `serve`, an HTTP server of a model."""

    data: ServedDataConfig = field(default_factory=ServedDataConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield the messages of `AskConfig.problems`, and one if ``samples_per_prompt`` is set."""
        yield from super().problems(key, run)
        if self.sampling.samples_per_prompt != 1:
            yield (
                f"sampling.samples_per_prompt={self.sampling.samples_per_prompt}: each request "
                "chooses its number of answers (n). Set it to 1"
            )


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(PromptedConfig):
    """All options of the commands `generate` and `chat`."""

    prompt: tuple[StrictStr, ...] = ()
    """Prompts in addition to `data.prompts`. `--prompt TEXT` adds one."""

    chat: StrictBool = False
    """Converse in the terminal instead: `--chat`."""

    output: FilePath | None = None
    """A `.jsonl` file for the answers: `--output FILE`. `null` prints them."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message if there are no prompts, or options do not fit a chat."""
        yield from super().problems(key, run)
        # A chat reads its prompts from the terminal.
        has_prompts = bool(self.prompt or self.data.prompts or self.data.sets)
        if self.chat and (has_prompts or self.output is not None):
            yield (
                "chat=true reads prompts from the terminal. Leave out prompt, data.prompts, "
                "data.sets and output"
            )
        if self.chat and self.cluster.engine == "local" and self.trainer.world_size > 1:
            yield (
                f"chat=true with {self.trainer.world_size} processes: each process would wait for "
                "the terminal. Set trainer.devices=1, or cluster.engine=ray"
            )
        if not self.chat and not has_prompts:
            yield "no prompts: give --prompt TEXT, data.prompts.source=FILE, or --chat"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(PromptedConfig):
    """All options of the command `evaluate`."""

    reward: RewardConfig
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    final_answer: Function = FINAL_ANSWER
    """Function that extracts the final answer from the text of a response. It returns None if the
    response contains no answer. `maj@k` compares the answers."""

    output: FilePath = "results/evaluation"
    """Directory of evaluation.json, answers.jsonl and report.html."""

    samples_shown: Count = 12
    """Answers of each set in the HTML report."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message if there are no prompts, or ``max_tokens`` is too low."""
        yield from super().problems(key, run)
        environment, response = self.environment, self.sampling.max_length
        if environment.is_set and environment.max_tokens <= response:
            yield (
                f"environment.max_tokens={environment.max_tokens} leaves no room for a prompt "
                f"before a response of sampling.max_length={response}. Raise "
                "environment.max_tokens or lower sampling.max_length"
            )
        if self.data.prompts is None and not self.data.sets:
            yield (
                "data.prompts.source: not set, and no data.sets. Set it to a .jsonl or .parquet "
                "file or a generator function (package.module:function)"
            )


def as_run(
    config: AskConfig, restore_from_path: str, peft: PeftConfig, tokenizer: str | None = None
) -> RSRunConfig:
    """Convert ``config`` to a training configuration, as the functions that start models require.

    Args:
        restore_from_path: model file. It differs from ``config.model.restore_from_path`` if this is
            a run's directory.
        peft: adapters of the model.
        tokenizer: tokenizer of the model, unless ``config.model.tokenizer`` is set.
    """
    # Sections that every command has.
    sampling_options = config.sampling.sampling_options
    rows = config.sampling.batch_size
    model = asdict(config.model) | {"restore_from_path": restore_from_path, "peft": peft}
    model["tokenizer"] = config.model.tokenizer or tokenizer

    # Sections that only `evaluate` has. A run requires a reward, which other commands never call.
    reward = RewardConfig(function=FINAL_ANSWER)
    environment = EnvironmentConfig()
    folder = "."
    checked_sections = ["policy", "cluster", "generation"]
    if isinstance(config, EvaluateConfig):
        reward, environment = config.reward, config.environment
        folder = config.output
        checked_sections += ["reward", "environment"]
    data: dict[str, Any] = {}
    source = None
    if isinstance(config, PromptedConfig):
        source = config.data.prompts
        data = {key.name: getattr(config.data, key.name) for key in fields(AnsweredColumns)}

    # Build the run, and check the sections that the command sets.
    run = RSRunConfig(
        model=RSModelConfig(
            **model,
            rs=PolicyRSConfig(
                num_rollout_samples=rows,
                num_rollouts_per_prompt=1,
                rollout_micro_batch_size=rows,
                length_params=sampling_options.length,
                sampling_params=sampling_options.sampling,
            ),
        ),
        trainer=RSTrainerConfig(**asdict(config.trainer)),
        seed=config.seed,
        cluster=config.cluster,
        policy=config.policy,
        generation=config.generation,
        reward=reward,
        environment=environment,
        data=DataConfig(train=source or PromptSourceConfig(source=""), **data),
        exp_manager=ExpManagerConfig(explicit_log_dir=folder),
    )
    refuse(
        chain.from_iterable(broken_rules(getattr(run, key), key, run) for key in checked_sections)
    )
    return run
