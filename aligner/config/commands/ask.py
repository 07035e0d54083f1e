"""Commands that ask a model and train nothing: answers to prompts, a chat, an evaluation."""

import dataclasses
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
from aligner.config.roles.model import RSModelConfig
from aligner.config.roles.peft import PeftConfig
from aligner.config.roles.policy import BackendConfig
from aligner.config.roles.sampling import PolicyRSConfig
from aligner.config.run import RSRunConfig
from aligner.config.validation import (
    FINAL_ANSWER,
    AnswerSamplingConfig,
    answer_problems,
)
from aligner.foreign_keys import shown


@dataclass(frozen=True)
class AskedModelConfig:
    """A model that is only asked, and its layout."""

    restore_from_path: Annotated[
        StrictStr, not_empty("a .nemo file, a Hugging Face directory or the directory of a run")
    ]
    """A `.nemo`, a Hugging Face directory, or the directory of a run: its newest state."""

    tokenizer: FilePath | None = None
    """Path of another tokenizer. `null` means the model's own."""

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
    """A set of prompts, with `source`, `arguments` and `limit`. `null` means none."""

    sets: Mapping[str, PromptSourceConfig] = field(default_factory=dict)
    """Further sets of prompts, `NAME: {source, arguments, limit}`."""


@dataclass(frozen=True)
class ServedDataConfig:
    """Prompts of requests."""

    system_prompt: StrictStr | None = None
    """Put before chat messages that bring none. `null` means nothing."""

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
    """Port. `0` means any that is free."""

    token_env: StrictStr | None = None
    """Environment variable that holds the bearer token. `null` means none."""

    token_file: FilePath | None = None
    """Or a file that holds it, written with a new one where there is none.

    With neither a new token is made and printed.
    """

    model_name: Annotated[StrictStr, not_empty("a name")] | None = None
    """Name of the model in requests. `null` means that of its file or directory."""

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

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse lengths that no response can have, and settings of training runs."""
        yield from self.sampling.problems("sampling", run)
        for option, value, default in (
            ("trainer.max_time", self.trainer.max_time, None),
            ("generation.async_rollouts", self.generation.async_rollouts, False),
            ("generation.in_flight", self.generation.in_flight, "finish"),
        ):
            if value != default:
                yield (
                    f"{option}={shown(value)} is of training runs, and nothing is trained here. "
                    f"Set it to {shown(default)}"
                )


@dataclass(frozen=True, kw_only=True)
class PromptedConfig(AskConfig):
    """Options of commands that read prompts."""

    data: AskedDataConfig = field(default_factory=AskedDataConfig)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse also samples that would all be equal."""
        yield from super().problems(key, run)
        samples, greedy = self.sampling.samples_per_prompt, self.sampling.use_greedy
        yield from answer_problems("sampling", samples, greedy, "data.sets", self.data.sets)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(AskConfig):
    """All options of serving a model over HTTP."""

    data: ServedDataConfig = field(default_factory=ServedDataConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse also a number of answers, which each request gives."""
        yield from super().problems(key, run)
        if self.sampling.samples_per_prompt != 1:
            yield (
                f"sampling.samples_per_prompt={self.sampling.samples_per_prompt}: a request says "
                "how many answers it wants (n). Set it to 1"
            )


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(PromptedConfig):
    """All options of generating."""

    prompt: tuple[StrictStr, ...] = ()
    """Prompts on the command line, beside `data.prompts`: `--prompt TEXT`."""

    chat: StrictBool = False
    """A conversation in the terminal instead: `--chat`."""

    output: FilePath | None = None
    """A `.jsonl` file to write: `--output FILE`. `null` means answers are printed."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse also nothing to answer, and a chat that has no terminal."""
        yield from super().problems(key, run)
        has_prompts = bool(self.prompt or self.data.prompts or self.data.sets)
        if self.chat and (has_prompts or self.output is not None):
            yield (
                "chat=true is a conversation in the terminal. Leave out prompt, data.prompts, "
                "data.sets and output"
            )
        if self.chat and self.cluster.engine == "local" and self.trainer.world_size > 1:
            yield (
                f"chat=true with {self.trainer.world_size} processes: each would wait for the "
                "terminal. Set trainer.devices=1, or cluster.engine=ray"
            )
        if not self.chat and not has_prompts:
            yield "nothing is asked: give --prompt TEXT, data.prompts.source=FILE, or --chat"


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

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse also no prompts, and conversations without room for one."""
        yield from super().problems(key, run)
        environment, response = self.environment, self.sampling.max_length
        if environment.is_set and environment.max_tokens <= response:
            yield (
                f"environment.max_tokens={environment.max_tokens} leaves no room for a prompt "
                f"before a response of sampling.max_length={response}. Raise the one, or lower the "
                "other"
            )
        if self.data.prompts is None and not self.data.sets:
            yield (
                "data.prompts.source: not given, and no data.sets. Name a .jsonl or .parquet file "
                "or a generator function (package.module:function)"
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
    sections = ["policy", "cluster", "generation"]
    if isinstance(config, EvaluateConfig):
        sections += ["reward", "environment"]
    refuse(chain.from_iterable(broken_rules(getattr(run, key), key, run) for key in sections))
    return run
