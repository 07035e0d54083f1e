"""`RayVirtualCluster`: resources on the nodes of a Ray cluster, in which worker groups start.

A bundle is a number of CPUs and optionally a GPU, for one worker of each group. Each node has one
placement group of bundles.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import floor
from pathlib import Path
from typing import Any

from aligner.config.layout import ParallelConfig
from aligner.distributed.named_sharding import NamedSharding, layout_of
from aligner.distributed.worker_groups import Bundle, RayWorkerBuilder, RayWorkerGroup
from aligner.errors import ConfigError, LayoutError, WorkerError

_PLACING_S = 60.0  # time limit of the wait for free resources
_ATTEMPT_S = 10.0  # time limit of one attempt to reserve bundles on selected nodes


class RayVirtualCluster:
    """Reserved resources (bundles) on the nodes of a Ray cluster, on which worker groups start."""

    engine = "ray"

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        use_gpus: bool | None = None,
        max_colocated_worker_groups: int = 1,
        name: str = "workers",
        *,
        cpus_per_bundle: float = 1.0,
        parallel: ParallelConfig | None = None,
        seed: int = 1234,
        timeout_s: float = 1800.0,
        log_dir: Path | None = None,
        env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Reserve the bundles. Raises `WorkerError` if resources are not free within a minute.

        Args:
            bundle_ct_per_node_list: number of bundles on each node.
            use_gpus: whether a bundle has one GPU. Default: true if the cluster has GPUs.
            max_colocated_worker_groups: number of groups that share each bundle in equal parts.
            name: name of the cluster in messages.
            cpus_per_bundle: number of CPUs in a bundle.
            parallel: default model-parallel sizes of worker groups.
            seed: seed of the random generators of training workers.
            timeout_s: maximum time in seconds for a call, and for collectives between workers.
            log_dir: directory of logs, visible on all nodes. Default: a temporary directory.
            env_vars: environment variables, set before the workers import anything.
        """
        import ray

        self.name, self.timeout_s = name, timeout_s
        # Resources of a bundle: CPUs, and one GPU if the cluster has GPUs.
        if use_gpus is None:
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            use_gpus = has_gpus and os.environ.get("ALIGNER_FORCE_CPU") != "1"
        self.use_gpus = use_gpus
        self._parallel, self._seed = parallel or ParallelConfig(), seed
        self._counts = list(bundle_ct_per_node_list)
        self._bundle = {"CPU": cpus_per_bundle, **({"GPU": 1.0} if use_gpus else {})}
        self._env_vars = dict(env_vars or {})
        # A bundle has one worker of each group. Every worker gets an equal part, rounded down to
        # Ray's smallest unit, 1e-4.
        self._max_groups = max_colocated_worker_groups
        self.shares_bundles = self._max_groups > 1
        share = {
            kind: floor(1e4 * size / self._max_groups) / 1e4 for kind, size in self._bundle.items()
        }
        self.worker_resources = {"num_cpus": share["CPU"], "num_gpus": share.get("GPU", 0.0)}
        self._groups: list[RayWorkerGroup] = []
        self._owns_logs = log_dir is None
        self.log_dir = (log_dir or Path(tempfile.mkdtemp(prefix="aligner-logs-"))).absolute()
        self.bundles: list[Bundle] = self._reserve()

    def start_workers(
        self,
        worker_class: str,
        name_prefix: str,
        *,
        layout: NamedSharding | None = None,
        python_executable: str | None = None,
        parallel: ParallelConfig | None = None,
        workers_per_node: int | Sequence[int] | None = None,
        env_vars: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """Start a worker ``worker_class(parallel=..., **kwargs)`` on every bundle, without waiting.

        Args:
            worker_class: dotted path of the class.
            name_prefix: name of the role in messages and logs.
            layout: ranks of the workers by axis. Default: those of ``parallel`` on all bundles.
            python_executable: another Python interpreter for the workers. Such workers get no
                argument ``parallel`` and do not join torch.distributed. They start last, when all
                other groups have allocated memory, because they measure free memory.
            parallel: model-parallel sizes of this group. Default: the sizes of the cluster.
            workers_per_node: number of bundles to use on each node. Default: all.
            env_vars: environment variables of this group, which override the cluster's.
            kwargs: other arguments of the class.

        Raises `LayoutError` if the sizes do not divide the number of workers, and `WorkerError` if
        the cluster already has ``max_colocated_worker_groups`` groups.
        """
        sizes = parallel or self._parallel
        if layout is None:
            workers = len(self.bundles_for(workers_per_node))
            if not workers or workers % sizes.model_parallel_size:
                raise LayoutError(
                    f"{workers} workers of the cluster {self.name} cannot be split into tensor "
                    f"{sizes.tensor} x pipeline {sizes.pipeline} x context {sizes.context} = "
                    f"{sizes.model_parallel_size}. Change the sizes or the number of bundles"
                )
            data_size = sizes.data_size(workers)
            layout = layout_of(sizes.pipeline, data_size, sizes.context, sizes.tensor)
        self._groups = [group for group in self._groups if group.is_alive]
        if len(self._groups) == self._max_groups:
            raise WorkerError(
                f"{name_prefix}: {self._max_groups} groups of workers already use the cluster "
                f"{self.name}. Raise max_colocated_worker_groups"
            )
        # Wait until the memory use of all other groups is stable.
        if python_executable is not None:
            for running_group in self._groups:
                running_group.wait_until_started()
        environment = {**self._env_vars, **(env_vars or {})}
        group = RayWorkerGroup(
            self,
            RayWorkerBuilder(worker_class, **kwargs),
            name_prefix,
            workers_per_node,
            sharding_annotations=layout,
            env_vars={key: str(value) for key, value in environment.items()},
            parallel=sizes if python_executable is None else None,
            seed=self._seed,
            python_executable=python_executable,
        )
        self._groups.append(group)
        return group

    def world_size(self) -> int:
        """Return the number of bundles."""
        return sum(self._counts)

    def bundles_for(self, workers_per_node: int | Sequence[int] | None = None) -> list[Bundle]:
        """Return the first ``workers_per_node`` bundles of each node. None means all bundles.

        ``workers_per_node``: the same number for each node, or a sequence with one number per node.
        """
        if workers_per_node is None:
            return self.bundles
        if isinstance(workers_per_node, int):
            workers_per_node = [workers_per_node] * len(self._counts)
        pairs = list(zip_longest(workers_per_node, self._counts, fillvalue=-1))
        if not sum(workers_per_node) or not all(0 <= count <= most for count, most in pairs):
            raise ConfigError(
                f"workers_per_node={workers_per_node}: the nodes of the cluster {self.name} have "
                f"{self._counts} bundles. Give at most these numbers"
            )
        limits = [count for count, most in pairs for _ in range(most)]
        limited = zip(self.bundles, limits, strict=True)
        return [bundle for bundle, limit in limited if bundle.index < limit]

    def node_count(self) -> int:
        """Return the number of nodes."""
        return len(self._counts)

    def get_placement_groups(self) -> list[Any]:
        """Return Ray's placement group of each node."""
        return list(dict.fromkeys(bundle.group for bundle in self.bundles))

    def shutdown(self) -> bool:
        """End all workers and release the bundles."""
        for group in self._groups:
            group.shutdown()
        self._groups = []
        self._release(self.get_placement_groups())
        self.bundles = []
        if self._owns_logs:
            shutil.rmtree(self.log_dir, ignore_errors=True)
        return True

    def _reserve(self) -> list[Bundle]:
        deadline = time.monotonic() + min(_PLACING_S, self.timeout_s)
        while True:
            nodes = self._select_nodes()
            groups = None if nodes is None else self._reserve_on(nodes)
            if nodes is not None and groups is not None:
                return [
                    Bundle(group, index, node)
                    for group, node, count in zip(groups, nodes, self._counts, strict=True)
                    for index in range(count)
                ]
            if time.monotonic() > deadline:
                raise WorkerError(self._describe_shortage())
            time.sleep(0.5)

    def _select_nodes(self) -> list[str] | None:
        """Return one node per count of bundles, with enough free resources, or None."""
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        selected: dict[int, str] = {}
        for position in sorted(range(len(self._counts)), key=lambda i: -self._counts[i]):
            required = {kind: size * self._counts[position] for kind, size in self._bundle.items()}
            fitting = [
                node
                for node, resources in free.items()
                if node not in selected.values()
                and all(resources.get(kind, 0.0) >= size for kind, size in required.items())
            ]
            if not fitting:
                return None
            selected[position] = min(fitting, key=lambda node: (free[node].get("CPU", 0.0), node))
        return [selected[position] for position in range(len(self._counts))]

    def _reserve_on(self, nodes: Sequence[str]) -> list[Any] | None:
        import ray
        from ray.util.placement_group import placement_group

        groups = [
            placement_group(
                [self._bundle] * count,
                strategy="STRICT_PACK",
                bundle_label_selector=[{"ray.io/node-id": node}] * count,
            )
            for node, count in zip(nodes, self._counts, strict=True)
        ]
        # Wait until all groups are placed, else release all groups.
        pending = [group.ready() for group in groups]
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=_ATTEMPT_S)
        if len(ready) == len(pending):
            return groups
        self._release(groups)
        return None

    def _release(self, groups: Sequence[Any]) -> None:
        from ray.util.placement_group import remove_placement_group

        for group in groups:
            with contextlib.suppress(Exception):  # the connection may be gone
                remove_placement_group(group)

    def _describe_shortage(self) -> str:
        import ray

        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        nodes = ", ".join(
            f"(CPU {node.get('CPU', 0):g}, GPU {node.get('GPU', 0):g})" for node in alive
        )
        return (
            f"the Ray cluster has no room for {self.name}: required are {self._counts} bundles of "
            f"{self._bundle} on {len(self._counts)} nodes. The cluster has {len(alive)} nodes with "
            f"{nodes}, possibly in use. Lower trainer.devices, trainer.num_nodes or "
            "cluster.cpus_per_worker, or add nodes"
        )
