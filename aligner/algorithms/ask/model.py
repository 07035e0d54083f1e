"""A model that is only asked: a `.nemo`, a Hugging Face directory, or what a run has come to."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aligner.algorithms.rollout.inputs import start_generation
from aligner.algorithms.rollout.validation import Asking
from aligner.algorithms.run.engine import Engine, Workers, open_engine
from aligner.algorithms.run.startup import check_room, describe_model_of
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.durable import atomic_file
from aligner.checkpoint.run_state.store import RunStateStore
from aligner.config import AskConfig, BackendConfig, PeftConfig, RSRunConfig, check_layout
from aligner.config.commands.ask import as_run
from aligner.config.parse import build
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import CheckpointError, CheckpointNotFoundError
from aligner.models.interfaces import GenerationInterface
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.collectives import gather_objects, this_rank

# The role that a run state holds of a policy: of runs that sample, and of supervised ones.
_ROLES = ("policy", "role")


@dataclass(frozen=True)
class Source:
    """Location of the weights.

    ``states``: folders of the role in run states of ``run``, newest first; none: ``path`` has them.
    """

    path: str  # a `.nemo`, a Hugging Face directory, or the model that the run began with
    name: str  # in words
    states: tuple[Path, ...] = ()
    tokenizer: str | None = None
    peft: PeftConfig = field(default_factory=PeftConfig)
    backend: str | None = None


def find_source(path: str) -> Source:
    """Find the weights that ``model.restore_from_path`` names.

    Raises:
        CheckpointNotFoundError: a run's directory without a state and without a model.
        CheckpointError: a run that trained no language model.
    """
    folder = Path(path).expanduser()
    trained = folder / "policy.nemo"
    if (folder / "run_state").is_dir():
        store = RunStateStore(folder / "run_state", rank=this_rank(), exchange=gather_objects)
        states, damaged = store.survey()
        for number, state in reversed(list(enumerate(states, start=1))):
            try:
                config = store.load(state.path).state["config"]
            except (CheckpointError, KeyError) as error:
                damaged.append(f"{state.path}: {error}")
                continue
            return _of_run(path, config, [one.path for one in reversed(states[:number])])
        if not trained.exists():
            raise CheckpointNotFoundError(
                f"model.restore_from_path={path} is the directory of a run, and no state in it can "
                "be read" + (f": {'; '.join(damaged)}" if damaged else "; it has not saved one yet")
            )
    found = str(trained) if trained.exists() else path
    return Source(found, found)


def _of_run(path: str, config: Mapping[str, Any], states: list[Path]) -> Source:
    if "reward_model" in config["trainer"]:
        raise CheckpointError(
            f"model.restore_from_path={path} is a run that trained a reward model, which does not "
            "answer; ask it with `aligner serve-reward --model`"
        )
    model = config["model"]
    roles = tuple(found for state in states for role in _ROLES if (found := state / role).is_dir())
    return Source(
        model["restore_from_path"],
        f"{path}, {states[0].name}",
        roles,
        model["tokenizer"],
        build(PeftConfig, model["peft"], "model.peft"),
        config["policy"]["backend"],
    )


@dataclass(frozen=True)
class AskedModel:
    """A model that is about to be asked; nothing of it is in memory yet."""

    run: RSRunConfig
    source: Source
    engine: Engine
    tokenizer: Tokenizer
    architecture: GPTArchitecture
    closing: ExitStack

    def check_room(self, longest_prompt: int) -> None:
        """Refuse prompts that leave no room for an answer."""
        response = self.run.model.rollout.length_params.max_length
        check_room(self.architecture, longest_prompt, "sampling.max_length", response)

    @property
    def rows(self) -> int:
        """Responses that are drawn in one call."""
        size = self.run.model.parallel.data_size(self.engine.worlds[0])
        return self.run.model.rollout.num_rollout_samples * max(1, size)

    def start(
        self, longest_prompt: int, say: Callable[[str], None]
    ) -> tuple[GenerationInterface, Workers]:
        """Load the weights and start what samples; it ends when ``closing`` closes.

        ``say``: called with a message on a damaged state that is passed over.
        """
        clusters = self.engine.clusters(self.closing)
        workers = Workers(self.run, self.tokenizer, self.architecture, clusters, self.closing)
        policy = workers.start_policy(init_optimizer=False)
        self._restore(policy, say)
        return start_generation(self.run, workers, policy, longest_prompt) or policy, workers

    def asking(self, engine: GenerationInterface, samples_per_prompt: int) -> Asking:
        """Settings by which prompts are put to ``engine``, which `start` has returned."""
        return Asking(engine, self.tokenizer.pad_id, self.run.seed, self.rows, samples_per_prompt)

    def _restore(self, policy: Policy, say: Callable[[str], None]) -> None:
        for number, folder in enumerate(self.source.states, start=1):
            try:
                return policy.load_state(folder)
            except CheckpointError as error:
                if number == len(self.source.states):
                    raise
                say(f"{error}; the state before it is taken")
        return None


def open_asked_model(config: AskConfig, closing: ExitStack) -> AskedModel:
    """Look into what ``model.restore_from_path`` names, and start the engine."""
    source = find_source(config.model.restore_from_path)
    if source.backend is not None and source.backend != config.policy.backend:
        # A run state is of the backend that saved it.
        backend = build(BackendConfig, {"backend": source.backend}, "policy")
        config = replace(config, policy=backend)
    run = as_run(config, source.path, source.peft, source.tokenizer)
    engine = open_engine(run, closing)
    tokenizer, architecture = describe_model_of(run)
    check_layout(architecture, run.model.parallel, engine.worlds[0])
    return AskedModel(run, source, engine, tokenizer, architecture, closing)


def write_answers(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write an object for each response as JSON lines."""
    with atomic_file(path) as file:
        for line in lines:
            file.write((json.dumps(line, ensure_ascii=False, default=str) + "\n").encode())
