"""Rehearsal: the run's own `train_*` function on workers that note what is called, and do nothing.

    configuration ─► train_* as in a dry run ─► roles as they were started, calls of one step

The run is set up and makes one step of its loop, on the host. Its workers answer with zeros of the
right shape. So the roles of a plan, their phases and the shapes of what they are given are those of
the run, for any algorithm. No file of a model, of data or of rewards is read. Sequences are short:
what has their length in a batch is of the greatest length in the plan.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch

from aligner.algorithms.run.calls import phase_named, role_named
from aligner.algorithms.run.engine import Clusters, run_settings
from aligner.algorithms.run.run import Attempt
from aligner.architecture import GPTArchitecture
from aligner.catalog import ALGORITHMS, imported
from aligner.checkpoint.canonical import REWARD_HEAD
from aligner.config import (
    BaseRunConfig,
    EnvironmentConfig,
    ParallelConfig,
    SamplingRunConfig,
    ValidationConfig,
    check_layout,
)
from aligner.config.commands.lengths import samples_responses
from aligner.config.commands.plan import PlanConfig, with_length
from aligner.config.roles.model import STAGE_KEYS
from aligner.data.dataset import Dataset, Split
from aligner.data.labelled import Labelled, LabelledDataset
from aligner.data.preferences import Pair, PairDataset
from aligner.data.prompts import Prompt, PromptDataset
from aligner.data.ratings import Rated, RatedDataset
from aligner.data.supervised import Example, ExampleDataset
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.named_sharding import layout_of
from aligner.distributed.workers import LocalFuture
from aligner.errors import ConfigError, LayoutError
from aligner.observe.metrics import PhaseTimers
from aligner_plan.roles import Column, Phase, PlannedRole, PlannedRun

# Tokens of a prompt and of a response in a rehearsal. Their sum is the size of no other axis.
_PROMPT, _RESPONSE = 1, 22
_ALGORITHMS = "aligner.algorithms."
_EXAMPLE = Example(0, [0, 0], [(1, 2)])


def planned_run(
    config: BaseRunConfig, plan: PlanConfig, architectures: Mapping[str, GPTArchitecture]
) -> PlannedRun:
    """Roles and phases of a training configuration.

    ``architectures``: by the path of each model that the configuration names.

    Raises:
        ConfigError: lengths that do not fit, or what the run itself refuses.
        LayoutError: a model cannot be cut so.
    """
    # Tokens are not known: nothing in common is the most that a run can need.
    config = replace(config, model=replace(config.model, shared_prefixes=False))
    if given := [key for key in STAGE_KEYS if getattr(config.model, key) is not None]:
        raise LayoutError(f"model.{given[0]}: plans have equal pipeline stages; set it to null")
    own = architectures[config.model.restore_from_path]
    check_layout(own, config.model.parallel, config.trainer.world_size)
    stage = _Stage(config, architectures, with_length(config, plan, own.max_position_embeddings))
    stage.rehearse()
    roles = [group.planned() for group in stage.groups]
    step = stage.step
    if isinstance(config, SamplingRunConfig) and config.generation.engine is not None:
        roles = _with_engine(config, roles)
        step = [("engine" if name == "generate" else role, name) for role, name in step]
        step.append(("policy", "refit"))
    step += [(role.name, "save") for role in reversed(roles) if role.phases[-1].name == "save"]
    return PlannedRun(config, {role.name: role for role in roles}, tuple(dict.fromkeys(step)))


def _with_engine(config: SamplingRunConfig, roles: Sequence[PlannedRole]) -> list[PlannedRole]:
    """``roles``, and rollout engines: our own generator in their layout, with their memory.

    They sample what the policy does in the rehearsal.
    """
    engines = config.generation.resources(has_gpu=True)
    if engines is None:
        raise ConfigError(
            f"generation.backend={config.generation.backend}: this engine does not state its "
            "resources, so that it cannot be planned; override EngineConfig.resources"
        )
    policy = next(role for role in roles if role.name == "policy")
    model = replace(
        config.model,
        tensor_model_parallel_size=engines.devices_of_each,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        sequence_parallel=False,
    )
    check_layout(policy.architecture, model.parallel, engines.workers, config.generation.engine_key)
    *others, save = (phase for phase in policy.phases if phase.method != "generate")
    shares = engines.shares_devices
    buffer_bytes = int(engines.refit_buffer_mb * (1 << 20)) if shares else 0
    refit = Phase("refit", buffer_bytes=buffer_bytes)
    frozen = {"config": model, "init_optimizer": False, "init_reference_model": False}
    engine = replace(
        policy,
        name="engine",
        options={**policy.options, **frozen},
        world=engines.workers,
        cards="policy" if shares else "engine",
        phases=tuple(phase for phase in policy.phases if phase.method == "generate"),
        engine=engines,
    )
    policy = replace(policy, phases=(*others, refit, save))
    return [*(policy if role.name == "policy" else role for role in roles), engine]


# Stand-ins ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cluster:
    """Stand-in for a cluster, on which workers are only noted."""

    stage: "_Stage"
    cards: str
    world: int
    parallel: ParallelConfig
    engine = "local"
    use_gpus = True
    sharding_annotations = layout_of(1, 1, 1, 1)

    def start_workers(self, worker_class: str, name_prefix: str, **kwargs: Any) -> Any:
        """Note how workers are started."""
        group = _Group(self, role_named(name_prefix), worker_class, kwargs)
        self.stage.groups.append(group)
        return group

    def world_size(self) -> int:
        """Number of workers."""
        return self.world


class _Group:
    """Stand-in for a group of workers, which notes calls; results are zeros of the right shape."""

    sharding_annotations = layout_of(1, 1, 1, 1)
    is_healthy = True

    def __init__(
        self, cluster: _Cluster, role: str, worker: str, options: Mapping[str, Any]
    ) -> None:
        self.cluster, self.role, self._worker = cluster, role, worker
        left_out = ("parallel", "workers_per_node", "env_vars", "tokenizer")
        self._options = {key: value for key, value in options.items() if key not in left_out}
        self._options["run"] = run_settings(cluster.stage.config)
        if "attributes" in options:
            self._options["attributes"] = tuple(options["attributes"] or ())
        self.phases: dict[str, Phase] = {}
        self._enter = ""

    def planned(self) -> PlannedRole:
        """The role, with a phase for each method that was called, and with its saving."""
        stage = self.cluster.stage
        return PlannedRole(
            self.role,
            stage.architecture(self._options["config"].restore_from_path),
            self._worker,
            self._options,
            self.cluster.world,
            self.cluster.cards,
            (*self.phases.values(), *([Phase("save")] if self.role in stage.saved else [])),
        )

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> LocalFuture:
        """Note a change of phase."""
        if method_name.startswith("prepare_for_"):
            self._enter = method_name
        return LocalFuture(
            [self.cluster.stage.rated if method_name == "reward_attributes" else None]
        )

    def run_all_workers_sharded_data(
        self, method_name: str, data: Sequence[Any], common_kwargs: Mapping[str, Any], **_: Any
    ) -> LocalFuture:
        """Note a call on a whole batch; further calls of a method add to its rows."""
        (batch,), name, stage = data, phase_named(method_name), self.cluster.stage
        stage.step.append((self.role, name))
        rows, width = batch["input_ids"].shape
        columns = {
            key: Column(tuple(None if n == width else n for n in tensor.shape[1:]), tensor.dtype)
            for key, tensor in batch.items()
            if isinstance(tensor, torch.Tensor)
        }
        before = self.phases.get(name, Phase(name, times=0))
        prompt, response = stage.lengths
        phase = Phase(name, method_name, before.rows + rows, 1, prompt + response, columns)
        phase = replace(phase, options=common_kwargs, enter=self._enter)
        if method_name == "train":
            size = common_kwargs["gbs"]
            phase = replace(phase, rows=size, times=before.times + rows // size)
        elif method_name == "generate":
            phase = replace(phase, length=prompt, response=response, options={})
        elif (self.role, name) == ("critic", "rewards"):  # with weights swapped into its body
            phase = replace(phase, method="get_values")
        self.phases[name] = phase
        return LocalFuture([self._answer(method_name, name, batch, common_kwargs)])

    def _answer(self, method: str, name: str, batch: Any, options: Mapping[str, Any]) -> Any:
        rows, width = batch["input_ids"].shape
        if method == "train":
            finite = dict.fromkeys(("global_loss", "grad_norm", "lr"), 1.0)
            return {**finite, "skipped": False, "all_mb_metrics": {}}
        if method == "generate":
            width += _RESPONSE
            lengths = batch["input_lengths"] + _RESPONSE
            return type(batch)(
                {
                    "output_ids": torch.zeros(rows, width, dtype=torch.int64),
                    "generation_lengths": torch.full((rows,), _RESPONSE),
                    "unpadded_sequence_lengths": lengths,
                    "logprobs": torch.zeros(rows, width),
                    "is_end": torch.ones(rows, dtype=torch.bool),
                }
            )
        if method == "get_topk_logits":
            best = torch.zeros(rows, width, options["k"])
            return type(batch)({"topk_logits": best, "topk_indices": best.long()})
        return type(batch)({name: torch.zeros(rows, width)})

    def get_all_worker_results(self, future: LocalFuture) -> list[Any]:
        """Results of a call."""
        return future.results

    def shutdown(self, cleanup_method: str | None = None) -> bool:
        """Nothing is to be ended."""
        del cleanup_method
        return True


class _Stage:
    """Start and calls of workers: their ``groups``, and role and phase of each call of a ``step``.

    ``lengths``: tokens of a prompt and of what follows it, in the plan. ``saved``: names of the
    roles that a run state holds.
    """

    max_restarts = 0

    def __init__(
        self,
        config: BaseRunConfig,
        architectures: Mapping[str, GPTArchitecture],
        lengths: tuple[int, int],
    ) -> None:
        self.config, self._architectures, self.lengths = config, architectures, lengths
        self.worlds = config.trainer.world_size, config.value_world_size
        self.groups: list[_Group] = []
        self.step: list[tuple[str, str]] = []
        self.saved: list[str] = []
        reward = config.reward if isinstance(config, SamplingRunConfig) else None
        self.rated = tuple((reward and reward.attribute_weights) or ())
        self._judge = reward and reward.model and reward.model.restore_from_path

    def architecture(self, path: str | None) -> GPTArchitecture:
        """Shape of the model at ``path``; without one the policy's."""
        shapes = self._architectures
        return shapes.get(path or "", shapes[self.config.model.restore_from_path])

    def rehearse(self) -> None:
        """Set the run up and make one step."""
        config = _on_stage(self.config)
        entries = (each for each in ALGORITHMS.values() if isinstance(config, each.root_class))
        train = imported(next(entries).builder)
        with self._without_files(), contextlib.redirect_stdout(io.StringIO()):
            train(config)

    def clusters(self, closing: object) -> Clusters:
        """Clusters of the run's roles, each with a name for its cards."""
        del closing
        config = self.config

        def cluster(world: int, cards: str = "policy") -> _Cluster:
            return _Cluster(self, cards, world, config.model.parallel)

        apart = config.cluster.engine == "ray" and not config.cluster.colocated
        policy = cluster(self.worlds[0])
        value = cluster(self.worlds[1], "critic" if apart else "policy")
        rewards = config.reward_world_size
        return Clusters(
            policy, value, policy, cluster(rewards, "reward model") if rewards else policy
        )

    @contextlib.contextmanager
    def _without_files(self) -> Iterator[None]:
        """Stand-ins for what a run reads, wherever an algorithm has imported it."""
        tokenizer = byte_level_tokenizer()

        def opened(path: str) -> contextlib.AbstractContextManager[Any]:
            outputs, shape = max(1, len(self.rated)), self.architecture(path)
            head = {REWARD_HEAD[0]: torch.empty(outputs, 1)} if path == self._judge else {}
            named = {"regression": {"attributes": self.rated}}
            return contextlib.nullcontext(
                SimpleNamespace(architecture=shape, tokenizer=tokenizer, weights=head, config=named)
            )

        stand_ins: dict[str, Callable[..., Any]] = {
            "open_model": opened,
            "open_nemo": opened,
            "open_engine": lambda config, closing: self,
            "longest_lengths": _short_lengths,
            "startup_summary": lambda *_, **__: None,
            "start_generation": lambda *_: None,  # the policy samples in an engine's place
            "describe_model_of": lambda config: (tokenizer, self.architecture(None)),
        }
        algorithms = [sys.modules[name] for name in sys.modules if name.startswith(_ALGORITHMS)]
        with contextlib.ExitStack() as stack:
            for module in algorithms:
                for name in stand_ins.keys() & vars(module).keys():
                    stack.enter_context(mock.patch.object(module, name, stand_ins[name]))
            stack.enter_context(mock.patch.object(Split, "load", _made_up))
            stack.enter_context(mock.patch.object(Attempt, "loop", self._loop))
            yield

    @contextlib.contextmanager
    def _loop(self, trainer: Any, *_: Any, **__: Any) -> Iterator[Any]:
        """Stand-in for `Attempt.loop`: one step, and the roles that a run state holds."""

        def step() -> None:
            for group in self.groups:
                group.phases.clear()  # of the set-up
            self.step.clear()
            trainer.step(1, PhaseTimers())
            self.saved = [role.worker_group.role for role in trainer.roles.values()]

        yield SimpleNamespace(run=step)


def _on_stage(config: BaseRunConfig) -> BaseRunConfig:
    """A dry run without code of the user's, and with one turn of a fixed length."""
    if isinstance(config, SamplingRunConfig):
        # A reward of an environment reads nothing.
        kind: Literal["model", "environment"] = "model" if config.reward.model else "environment"
        config = replace(
            config,
            reward=replace(config.reward, kind=kind, function=None, server=None),
            environment=EnvironmentConfig(),
            validation=ValidationConfig(),
            generation=replace(config.generation, async_rollouts=False),
        )
    return replace(config, dry_run=True, trainer=replace(config.trainer, callbacks=()))


def _short_lengths(config: BaseRunConfig, *_: Any, **__: Any) -> tuple[int, int]:
    """Stand-in for `longest_lengths`."""
    if samples_responses(config):
        return _PROMPT, _RESPONSE
    return 0, _PROMPT + _RESPONSE


def _made_up(kind: type[Dataset[Any]], data: Any, tokenizer: object) -> Split[Any]:
    """Stand-in for `Split.load`: one item, of no matter which length."""
    del tokenizer
    ratings = tuple(1.0 for _ in getattr(data, "attribute_columns", ()))
    items: dict[type[Dataset[Any]], Any] = {
        PromptDataset: Prompt(0, "", [0], None),
        ExampleDataset: _EXAMPLE,
        PairDataset: Pair(_EXAMPLE, _EXAMPLE),
        RatedDataset: Rated(_EXAMPLE, ratings),
        LabelledDataset: Labelled(_EXAMPLE, True, _EXAMPLE),
    }
    return Split(kind([next(item for base, item in items.items() if issubclass(kind, base))]))
