"""Rehearsal: the run's own `train_*` function on workers that record their calls and do nothing.

    configuration ─► train_* as in a dry run ─► roles as they were started, calls of one step

The run is set up on the host and makes one step of its loop. Its workers return zeros of the right
shape. Roles, phases and the shapes of their batches are therefore those of the run, for any
algorithm. No file of a model, of data or of rewards is read. The sequences of the rehearsal are
short. An axis of their length becomes an axis of the greatest length in the plan.
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

from aligner.algorithms.run.dry_run import phase_named, role_named
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
from aligner.config.roles.model import STAGE_KEYS
from aligner.data.batches import Prompt
from aligner.data.dataset import Dataset
from aligner.data.preferences import (
    Labelled,
    LabelledDataset,
    Pair,
    PairDataset,
    Rated,
    RatedDataset,
)
from aligner.data.prompts import PromptDataset
from aligner.data.supervised import Example, ExampleDataset
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.named_sharding import layout_of
from aligner.distributed.workers import LocalFuture
from aligner.errors import ConfigError, LayoutError
from aligner.observe.metrics import PhaseTimers
from aligner_plan.options import PlanConfig, with_length
from aligner_plan.roles import Column, Phase, PlannedRole, PlannedRun

# Tokens of a prompt and of a response in a rehearsal. No other axis may have the size of their sum.
_PROMPT, _RESPONSE = 1, 22
_ALGORITHMS = "aligner.algorithms."
_EXAMPLE = Example(0, [0, 0], [(1, 2)])


def planned_run(
    config: BaseRunConfig, plan: PlanConfig, architectures: Mapping[str, GPTArchitecture]
) -> PlannedRun:
    """Determine the roles and phases of a training configuration.

    ``architectures``: by the path of each model in the configuration.

    Raises:
        ConfigError: lengths do not fit, or the run itself refuses the configuration.
        LayoutError: a model cannot be split as configured.
    """
    # Tokens are unknown. The run needs most if the sequences have no common prefixes.
    config = replace(config, model=replace(config.model, shared_prefixes=False))
    if stage_keys := [key for key in STAGE_KEYS if getattr(config.model, key) is not None]:
        raise LayoutError(
            f"model.{stage_keys[0]}: plans have equal pipeline stages. Set it to null"
        )
    shape = architectures[config.model.restore_from_path]
    check_layout(shape, config.model.parallel, config.trainer.world_size)
    lengths = with_length(config, plan, shape.max_position_embeddings)
    rehearsal = _Rehearsal(config, architectures, lengths)
    rehearsal.run()
    roles = [group.planned() for group in rehearsal.groups]
    step = rehearsal.step
    if isinstance(config, SamplingRunConfig) and config.generation.engine is not None:
        roles = _with_engine(config, roles)
        step = [("engine" if name == "generate" else role, name) for role, name in step]
        step.append(("policy", "refit"))
    step += [(role.name, "save") for role in reversed(roles) if role.phases[-1].name == "save"]
    return PlannedRun(config, {role.name: role for role in roles}, tuple(dict.fromkeys(step)))


def _with_engine(config: SamplingRunConfig, roles: Sequence[PlannedRole]) -> list[PlannedRole]:
    """Add a role for rollout engines: our generator in their layout, with their memory.

    It samples the responses that the policy samples in the rehearsal.
    """
    engines = config.generation.resources(has_gpu=True)
    if engines is None:
        raise ConfigError(
            f"generation.backend={config.generation.backend}: this engine does not state its "
            "resources, so it cannot be planned. Override EngineConfig.resources"
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
    # The engine samples, the policy does everything else and sends its weights.
    engine = replace(
        policy,
        name="engine",
        options={
            **policy.options,
            "config": model,
            "init_optimizer": False,
            "init_reference_model": False,
        },
        world=engines.workers,
        cards="policy" if engines.shares_devices else "engine",
        phases=tuple(phase for phase in policy.phases if phase.method == "generate"),
        engine=engines,
    )
    *calls, save = (phase for phase in policy.phases if phase.method != "generate")
    buffer_bytes = int(engines.refit_buffer_mb * (1 << 20)) if engines.shares_devices else 0
    refit = Phase("refit", buffer_bytes=buffer_bytes)
    policy = replace(policy, phases=(*calls, refit, save))
    return [*(policy if role.name == "policy" else role for role in roles), engine]


# Substitutes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cluster:
    """Substitute for a cluster, which records the workers that are started on it."""

    rehearsal: "_Rehearsal"
    cards: str
    world: int
    parallel: ParallelConfig
    engine = "local"
    use_gpus = True
    sharding_annotations = layout_of(1, 1, 1, 1)

    def start_workers(self, worker_class: str, name_prefix: str, **kwargs: Any) -> Any:
        """Record the arguments of workers."""
        group = _Group(self, role_named(name_prefix), worker_class, kwargs)
        self.rehearsal.groups.append(group)
        return group

    def world_size(self) -> int:
        """Return the number of workers."""
        return self.world


class _Group:
    """Substitute for a group of workers, which records calls and returns zeros."""

    sharding_annotations = layout_of(1, 1, 1, 1)
    is_healthy = True

    def __init__(
        self, cluster: _Cluster, role: str, worker: str, options: Mapping[str, Any]
    ) -> None:
        self.cluster, self.role, self._worker = cluster, role, worker
        left_out = ("parallel", "workers_per_node", "env_vars", "tokenizer")
        self._options = {key: value for key, value in options.items() if key not in left_out}
        self._options["run"] = run_settings(cluster.rehearsal.config)
        if "attributes" in options:
            self._options["attributes"] = tuple(options["attributes"] or ())
        self.phases: dict[str, Phase] = {}
        self._enter = ""

    def planned(self) -> PlannedRole:
        """Return the role, with a phase for each method that was called, and a phase ``save``."""
        rehearsal = self.cluster.rehearsal
        save = [Phase("save")] if self.role in rehearsal.saved else []
        return PlannedRole(
            self.role,
            rehearsal.architecture(self._options["config"].restore_from_path),
            self._worker,
            self._options,
            self.cluster.world,
            self.cluster.cards,
            (*self.phases.values(), *save),
        )

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> LocalFuture:
        """Record a change of phase."""
        if method_name.startswith("prepare_for_"):
            self._enter = method_name
        attributes = self.cluster.rehearsal.attributes
        return LocalFuture([attributes if method_name == "reward_attributes" else None])

    def run_all_workers_sharded_data(
        self, method_name: str, data: Sequence[Any], common_kwargs: Mapping[str, Any], **_: Any
    ) -> LocalFuture:
        """Record a call on a complete batch. Repeated calls of a method add their rows."""
        (batch,), name, rehearsal = data, phase_named(method_name), self.cluster.rehearsal
        rehearsal.step.append((self.role, name))
        rows, width = batch["input_ids"].shape
        columns = {
            key: Column(
                tuple(None if size == width else size for size in tensor.shape[1:]), tensor.dtype
            )
            for key, tensor in batch.items()
            if isinstance(tensor, torch.Tensor)
        }
        earlier = self.phases.get(name, Phase(name, times=0))
        prompt, response = rehearsal.lengths
        phase = Phase(name, method_name, earlier.rows + rows, 1, prompt + response, columns)
        phase = replace(phase, options=common_kwargs, enter=self._enter)
        if method_name == "train":
            size = common_kwargs["gbs"]
            phase = replace(phase, rows=size, times=earlier.times + rows // size)
        elif method_name == "generate":
            phase = replace(phase, length=prompt, response=response, options={})
        elif (self.role, name) == ("critic", "rewards"):  # with weights swapped into its body
            phase = replace(phase, method="get_values")
        self.phases[name] = phase
        return LocalFuture([_zero_result(method_name, name, batch, common_kwargs)])

    def get_all_worker_results(self, future: LocalFuture) -> list[Any]:
        """Return the results of a call."""
        return future.results

    def shutdown(self, cleanup_method: str | None = None) -> bool:
        """Do nothing, because no process was started."""
        del cleanup_method
        return True


def _zero_result(method: str, name: str, batch: Any, options: Mapping[str, Any]) -> Any:
    """Return a result of ``method`` with the right shapes."""
    rows, width = batch["input_ids"].shape
    if method == "train":
        finite = dict.fromkeys(("global_loss", "grad_norm", "lr"), 1.0)
        return {**finite, "skipped": False, "all_mb_metrics": {}}
    if method == "generate":
        width += _RESPONSE
        return type(batch)(
            {
                "output_ids": torch.zeros(rows, width, dtype=torch.int64),
                "generation_lengths": torch.full((rows,), _RESPONSE),
                "unpadded_sequence_lengths": batch["input_lengths"] + _RESPONSE,
                "logprobs": torch.zeros(rows, width),
                "is_end": torch.ones(rows, dtype=torch.bool),
            }
        )
    if method == "get_topk_logits":
        logits = torch.zeros(rows, width, options["k"])
        return type(batch)({"topk_logits": logits, "topk_indices": logits.long()})
    return type(batch)({name: torch.zeros(rows, width)})


class _Rehearsal:
    """Record of a run: ``groups`` of workers, and role and phase of each call of a ``step``.

    It is the engine of the rehearsed run. ``lengths``: tokens of a prompt and of the text after it,
    in the plan. ``saved``: names of the roles in a run state. ``attributes``: attributes that a
    reward model rates.
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
        self.attributes = tuple((reward and reward.attribute_weights) or ())
        self._reward_model = reward and reward.model and reward.model.restore_from_path

    def architecture(self, path: str | None) -> GPTArchitecture:
        """Return the architecture of the model at ``path``, by default the policy's."""
        shapes = self._architectures
        return shapes.get(path or "", shapes[self.config.model.restore_from_path])

    def run(self) -> None:
        """Set the run up and make one step."""
        config = _rehearsal_config(self.config)
        entries = (entry for entry in ALGORITHMS.values() if isinstance(config, entry.root_class))
        train = imported(next(entries).builder)
        with self._without_files(), contextlib.redirect_stdout(io.StringIO()):
            train(config)

    def clusters(self, closing: object) -> Clusters:
        """Return substitutes for the clusters of the roles, each with a name for its cards."""
        del closing
        config = self.config

        def cluster(world: int, cards: str = "policy") -> _Cluster:
            return _Cluster(self, cards, world, config.model.parallel)

        separate = config.cluster.engine == "ray" and not config.cluster.colocated
        policy = cluster(self.worlds[0])
        value = cluster(self.worlds[1], "critic" if separate else "policy")
        rewards = config.reward_world_size
        return Clusters(
            policy, value, policy, cluster(rewards, "reward model") if rewards else policy
        )

    @contextlib.contextmanager
    def _without_files(self) -> Iterator[None]:
        """Replace functions that read files in all modules that have imported them."""
        tokenizer = byte_level_tokenizer()

        def open_source(path: str, *_: Any, **__: Any) -> contextlib.AbstractContextManager[Any]:
            outputs, shape = max(1, len(self.attributes)), self.architecture(path)
            is_reward_model = path == self._reward_model
            head = {REWARD_HEAD[0]: torch.empty(outputs, 1)} if is_reward_model else {}
            named = {"regression": {"attributes": self.attributes}}
            return contextlib.nullcontext(
                SimpleNamespace(architecture=shape, tokenizer=tokenizer, weights=head, config=named)
            )

        # Functions by the name under which the algorithms import them.
        substitutes: dict[str, Callable[..., Any]] = {
            "open_model": open_source,
            "open_nemo": open_source,
            "open_engine": lambda config, closing: self,
            "longest_lengths": lambda config, *_, **__: (
                (_PROMPT, _RESPONSE) if samples_responses(config) else (0, _PROMPT + _RESPONSE)
            ),
            "startup_summary": lambda *_, **__: None,
            "start_generation": lambda *_: None,  # the policy samples instead of an engine
            "describe_model_of": lambda config: (tokenizer, self.architecture(None)),
        }
        algorithms = [sys.modules[name] for name in sys.modules if name.startswith(_ALGORITHMS)]
        with contextlib.ExitStack() as stack:
            for module in algorithms:
                for name in substitutes.keys() & vars(module).keys():
                    stack.enter_context(mock.patch.object(module, name, substitutes[name]))
            for dataset in (Dataset, PromptDataset, LabelledDataset):  # each has a method load
                stack.enter_context(mock.patch.object(dataset, "load", classmethod(_synthetic_set)))
            stack.enter_context(mock.patch.object(Attempt, "loop", self._loop))
            yield

    @contextlib.contextmanager
    def _loop(self, trainer: Any, *_: Any, **__: Any) -> Iterator[Any]:
        """Substitute for `Attempt.loop`, which makes one step and records the saved roles."""

        def step() -> None:
            # Forget the calls of the set-up.
            for group in self.groups:
                group.phases.clear()
            self.step.clear()
            trainer.step(1, PhaseTimers())
            self.saved = [role.worker_group.role for role in trainer.roles.values()]

        yield SimpleNamespace(run=step)


def _rehearsal_config(config: BaseRunConfig) -> BaseRunConfig:
    """Return the configuration of a dry run without user code, with single turns."""
    if isinstance(config, SamplingRunConfig):
        # Rewards of an environment read nothing.
        kind: Literal["model", "environment"] = "model" if config.reward.model else "environment"
        config = replace(
            config,
            reward=replace(config.reward, kind=kind, function=None, server=None),
            environment=EnvironmentConfig(),
            validation=ValidationConfig(),
            generation=replace(config.generation, async_rollouts=False),
        )
    return replace(config, dry_run=True, trainer=replace(config.trainer, callbacks=()))


def _synthetic_set(
    kind: type[Dataset[Any]], source: object, tokenizer: object, data: Any
) -> Dataset[Any]:
    """Substitute for `Dataset.load`, which returns one item of an arbitrary length."""
    del source, tokenizer
    ratings = tuple(1.0 for _ in getattr(data, "attribute_columns", ()))
    items: dict[type[Dataset[Any]], Any] = {
        PromptDataset: Prompt(0, "", [0], None),
        ExampleDataset: _EXAMPLE,
        PairDataset: Pair(_EXAMPLE, _EXAMPLE),
        RatedDataset: Rated(_EXAMPLE, ratings),
        LabelledDataset: Labelled(_EXAMPLE, True, _EXAMPLE),
    }
    return kind([next(item for base, item in items.items() if issubclass(kind, base))])
