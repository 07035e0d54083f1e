"""A model for inference: a `.nemo` file, a Hugging Face directory, or a run's latest weights."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aligner.algorithms.rollout.inputs import start_generation
from aligner.algorithms.rollout.validation import PromptSampling
from aligner.algorithms.run.engine import Engine, Workers, open_engine
from aligner.algorithms.run.startup import check_room, describe_model_of
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.durable import atomic_file
from aligner.checkpoint.model_source import is_built_by_transformers
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import AskConfig, BackendConfig, PeftConfig, RSRunConfig, check_layout
from aligner.config.commands.ask import as_run
from aligner.config.parse import build
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import CheckpointError, CheckpointNotFoundError
from aligner.models.interfaces import GenerationInterface
from aligner.parallel.collectives import gather_objects, this_rank

# Names of the policy in run states, of runs that sample and of supervised runs.
_ROLES = ("policy", "role")


@dataclass(frozen=True)
class Source:
    """Location of a model's weights, and settings of the run that trained it."""

    path: str  # a `.nemo`, a Hugging Face directory, or the model that the run started from
    name: str  # for messages
    states: tuple[Path, ...] = ()  # weights in run states, newest first. If empty, load ``path``
    tokenizer: str | None = None
    peft: PeftConfig = field(default_factory=PeftConfig)
    backend: str | None = None


def find_source(path: str) -> Source:
    """Find the weights at ``path``: a model, or the directory of a run that trained a policy.

    Raises `CheckpointError` if the run trained a reward model, or its states cannot be read.
    """
    folder = Path(path).expanduser()
    trained = next(filter(Path.exists, (folder / "policy.nemo", folder / "policy")), None)
    if (folder / "run_state").is_dir():
        store = RunStateStore(folder / "run_state", rank=this_rank(), exchange=gather_objects)
        states, damaged = store.survey()
        # Take the settings from the newest state whose configuration can be read.
        for count, state in reversed(list(enumerate(states, start=1))):
            try:
                config = store.load(state.path).state["config"]
            except (CheckpointError, KeyError) as error:
                damaged.append(f"{state.path}: {error}")
                continue
            if "reward_model" in config["trainer"]:
                raise CheckpointError(
                    f"model.restore_from_path={path} is a run that trained a reward model, which "
                    "cannot generate text. Serve its rewards with `aligner serve-reward --model`"
                )
            model, paths = config["model"], [state.path for state in reversed(states[:count])]
            folders = (state_path / role for state_path in paths for role in _ROLES)
            return Source(
                model["restore_from_path"],
                f"{path}, {paths[0].name}",
                tuple(filter(Path.is_dir, folders)),
                model["tokenizer"],
                build(PeftConfig, model["peft"], "model.peft"),
                config["policy"]["backend"],
            )
        if trained is None:
            raise CheckpointNotFoundError(
                f"model.restore_from_path={path} is the directory of a run, but no run state in it "
                f"can be read ({', '.join(damaged) or 'none was saved yet'}). Set it to a model, "
                "or to another run"
            )
    # Without a readable state, use the trained model or the model at ``path``.
    location = path if trained is None else str(trained)
    is_own = is_built_by_transformers(location)
    return Source(location, location, backend="dtensor" if is_own else None)


@dataclass(frozen=True)
class InferenceModel:
    """A model for inference. `start` loads its weights."""

    run: RSRunConfig
    source: Source
    engine: Engine
    tokenizer: Tokenizer
    architecture: GPTArchitecture
    closing: ExitStack

    def check_room(self, longest_prompt: int) -> None:
        """Raise `ConfigError` if ``longest_prompt`` tokens leave no positions for an answer."""
        response = self.run.model.rollout.length_params.max_length
        check_room(self.architecture, longest_prompt, "sampling.max_length", response)

    @property
    def rows(self) -> int:
        """Maximum number of responses that one call of the engine samples."""
        size = self.run.model.parallel.data_size(self.engine.worlds[0])
        return self.run.model.rollout.num_rollout_samples * max(1, size)

    def start(
        self, longest_prompt: int, say: Callable[[str], None]
    ) -> tuple[GenerationInterface, Workers]:
        """Load the newest undamaged weights. Return the sampling engine and all workers."""
        clusters = self.engine.clusters(self.closing)
        workers = Workers(self.run, self.tokenizer, self.architecture, clusters, self.closing)
        policy = workers.start_policy(init_optimizer=False)
        for number, folder in enumerate(self.source.states, start=1):
            try:
                policy.load_state(folder)
                break
            except CheckpointError as error:
                if number == len(self.source.states):
                    raise
                say(f"{error}. The previous run state is used")
        return start_generation(self.run, workers, policy, longest_prompt) or policy, workers

    def sampling(self, engine: GenerationInterface, samples_per_prompt: int) -> PromptSampling:
        """Return settings for sampling from ``engine``, the first result of `start`."""
        pad_id, seed = self.tokenizer.pad_id, self.run.seed
        return PromptSampling(engine, pad_id, seed, self.rows, samples_per_prompt)


def open_model(config: AskConfig, closing: ExitStack) -> InferenceModel:
    """Read the model's description, and start processes for the model until ``closing`` closes."""
    source = find_source(config.model.restore_from_path)
    if source.backend is not None and source.backend != config.policy.backend:
        # A run state needs the backend that saved it, and some models need the dtensor backend.
        backend = build(BackendConfig, {"backend": source.backend}, "policy")
        config = replace(config, policy=backend)
    run = as_run(config, source.path, source.peft, source.tokenizer)
    engine = open_engine(run, closing)
    tokenizer, architecture = describe_model_of(run)
    check_layout(architecture, run.model.parallel, engine.worlds[0])
    return InferenceModel(run, source, engine, tokenizer, architecture, closing)


def write_answers(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write ``lines`` to ``path`` as JSON, one per line."""
    with atomic_file(path) as file:
        for line in lines:
            file.write((json.dumps(line, ensure_ascii=False, default=str) + "\n").encode())
