"""Start of a run's workers, in the run's own processes or on Ray."""

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from aligner.algorithms.run.directory import log_dir
from aligner.architecture import GPTArchitecture
from aligner.config import BaseRunConfig, ParallelConfig, SamplingRunConfig
from aligner.data.tokenizers.tokenizer import TEMPLATE_TIME, Tokenizer
from aligner.device import accelerator
from aligner.distributed.interfaces import Cluster
from aligner.distributed.workers import LocalCluster
from aligner.errors import ConfigError
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.handle import RoleHandle
from aligner.models.interfaces import GenerationInterface
from aligner.models.policy.lm_policy import Policy
from aligner.packages import check_versions, require_extra
from aligner.parallel.groups import describe_layout, initialize_parallel
from aligner.parallel.heartbeat import watched_ranks
from aligner.parallel.launch import started_processes

_ROLES_PER_BUNDLE = 4  # policy, critic, sampling engine and reward model


@dataclass(frozen=True)
class Clusters:
    """Clusters of processes or Ray actors on which the workers of each model run."""

    policy: Cluster
    value: Cluster
    generation: Cluster
    reward: Cluster

    @classmethod
    def shared(cls, cluster: Cluster) -> "Clusters":
        """Return one cluster for all roles."""
        return cls(cluster, cluster, cluster, cluster)

    def describe(self, config: BaseRunConfig) -> str:
        """Return a description of the parallel layout, with the critic's if it differs."""
        policy = describe_layout(config.model.parallel, self.policy.world_size())
        if not config.value_world_size:
            return policy
        value = describe_layout(config.value_parallel, self.value.world_size())
        return policy if policy == value else f"{policy}, critic {value}"


class LocalEngine:
    """Engine in which the run's own processes are the workers of all models."""

    max_restarts = 0  # the launcher restarts processes

    def __init__(self, config: BaseRunConfig, closing: ExitStack) -> None:
        """Start processes unless a launcher did. Watch all processes until ``closing`` closes."""
        timeout_s = config.cluster.timeout_s
        with started_processes(config.trainer, timeout_s):
            parallel = initialize_parallel(
                config.model.parallel, seed=config.seed, timeout_s=timeout_s
            )
            closing.enter_context(watched_ranks(parallel, timeout_s))
        self._cluster = LocalCluster(parallel)
        self.worlds = (parallel.world_size, parallel.world_size if config.value_world_size else 0)

    def clusters(self, closing: ExitStack) -> Clusters:
        """Return the run's processes as the cluster of every model. ``closing`` is not used."""
        del closing
        return Clusters.shared(self._cluster)


class RayEngine:
    """Engine in which Ray actors are the workers, and this process drives them."""

    def __init__(self, config: BaseRunConfig, log_dir: Path, closing: ExitStack) -> None:
        """Raise `ConfigError` if a launcher such as torchrun started this process."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "cluster.engine=ray starts the workers itself, but a launcher started "
                f"{os.environ['WORLD_SIZE']} processes of this command. Run it without torchrun, "
                "and set the number of workers with trainer.devices and trainer.num_nodes"
            )
        self.max_restarts = config.cluster.max_restarts
        self.worlds = (config.trainer.world_size, config.value_world_size)
        self._config, self._closing, self._log_dir = config, closing, log_dir / "workers"
        closing.enter_context(accelerator.gpus_left_to_others())
        self._is_connected = False

    def clusters(self, closing: ExitStack) -> Clusters:
        """Reserve the workers of each model on Ray, until ``closing`` closes."""
        from aligner.distributed.ray.session import ray_session
        from aligner.distributed.virtual_cluster import RayVirtualCluster

        # Connect to Ray at the first attempt, until the run ends.
        config, trainer = self._config, self._config.trainer
        if not self._is_connected:
            workers = trainer.world_size + config.generation_world_size + config.reward_world_size
            workers += 0 if config.cluster.colocated else config.value_world_size
            cpus = workers * config.cluster.cpus_per_worker
            session = ray_session(config.cluster.address, cpus, config.cluster.object_store_mb)
            self._closing.enter_context(session)
            self._is_connected = True
        env_vars = {key: os.environ[key] for key in (TEMPLATE_TIME,) if key in os.environ}

        def cluster(
            name: str, counts: list[int], groups: int, parallel: ParallelConfig | None = None
        ) -> RayVirtualCluster:
            reserved = RayVirtualCluster(
                counts,
                max_colocated_worker_groups=groups,
                name=name,
                cpus_per_bundle=config.cluster.cpus_per_worker,
                parallel=parallel or config.model.parallel,
                seed=config.seed,
                timeout_s=config.cluster.timeout_s,
                log_dir=self._log_dir,
                env_vars={**env_vars, **config.cluster.env_vars},
            )
            closing.callback(reserved.shutdown)
            return reserved

        # Roles share the policy's bundles unless they have separate workers.
        policy = cluster("policy", [trainer.devices] * trainer.num_nodes, _ROLES_PER_BUNDLE)
        value = generation = reward = policy
        if not config.cluster.colocated and config.value_world_size:
            # Spread the critic's workers evenly over the nodes of the policy.
            nodes, workers = trainer.num_nodes, config.value_world_size
            counts = [workers // nodes + (node < workers % nodes) for node in range(nodes)]
            value = cluster("critic", [*filter(None, counts)], 1, config.value_parallel)
        if workers := config.generation_world_size:
            generation = cluster("generation", _filled(workers, trainer.devices), 1)
        if workers := config.reward_world_size:
            reward = cluster("reward", _filled(workers, trainer.devices), 1)
        return Clusters(policy, value, generation, reward)


# ``worlds``: numbers of workers of policy and critic (0 without a critic). A launcher may start
# more processes than ``trainer.devices``.
Engine = LocalEngine | RayEngine


def open_engine(config: BaseRunConfig, closing: ExitStack) -> Engine:
    """Check the installed packages, and start the engine until ``closing`` closes.

    Raises `VersionError` or `MissingPackageError` if a package is incompatible or missing.
    """
    check_versions()
    if config.cluster.engine == "ray":
        require_extra("ray", "cluster.engine=ray")
    if config.exp_manager.create_wandb_logger:
        require_extra("wandb", "exp_manager.create_wandb_logger=true")
    if isinstance(config, SamplingRunConfig):
        if config.reward.kind == "server":
            require_extra("serve", "reward.kind=server")
        if (extra := config.environment.kind_class.extra) is not None:
            require_extra(extra, f"environment.kind={config.environment.kind}")
    if config.trainer.deterministic:
        accelerator.make_deterministic()
    if config.cluster.engine == "ray":
        return RayEngine(config, log_dir(config), closing)
    return LocalEngine(config, closing)


def _filled(workers: int, per_node: int) -> list[int]:
    """Return the number of workers on each node. Only the last node may have fewer."""
    full, remainder = divmod(workers, per_node)
    return [per_node] * full + ([remainder] if remainder else [])


Resource = TypeVar("Resource", bound=RoleHandle | GenerationInterface)


@dataclass(eq=False)
class Workers:
    """Workers of a run's models. ``closing`` shuts the workers down, in reverse order."""

    config: BaseRunConfig
    tokenizer: Tokenizer
    architecture: GPTArchitecture
    clusters: Clusters
    closing: ExitStack
    roles: list[RoleHandle] = field(default_factory=list, init=False)  # in the order of starting

    def own(self, resource: Resource) -> Resource:
        """Shut down ``resource`` when ``closing`` closes, and return it."""
        self.closing.callback(resource.shutdown)
        if isinstance(resource, RoleHandle):
            self.roles.append(resource)
        return resource

    def start_policy(
        self,
        max_optimizer_steps: int | None = None,
        *,
        with_reference: bool = False,
        init_optimizer: bool = True,
    ) -> Policy:
        """Start the policy. ``with_reference``: keep its initial weights as the reference."""
        config = self.config
        policy = Policy(
            self.clusters.policy,
            config.model,
            self.tokenizer,
            run=run_settings(config, max_optimizer_steps),
            backend=config.policy.backend,
            init_optimizer=init_optimizer,
            init_reference_model=with_reference,
        )
        return self.own(policy)


def run_settings(config: BaseRunConfig, max_optimizer_steps: int | None = None) -> RunSettings:
    """Return the settings that all models of a run share, such as precision and seed."""
    return RunSettings(
        precision=config.trainer.precision,
        gradient_clip_val=config.loop.gradient_clip_val,
        non_finite=config.loop.non_finite,
        non_finite_dir=log_dir(config),
        seed=config.seed,
        cuda_graphs=not isinstance(config, SamplingRunConfig) or config.generation.cuda_graphs,
        max_optimizer_steps=max_optimizer_steps,
    )
