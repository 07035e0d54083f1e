"""Import paths of NeMo-RL and NeMo-Aligner: one table of what they hold here, and its importer.

A path with ``nemo_rl`` or ``nemo_aligner`` replaced by ``aligner`` is a module with the names of
its homes. A path that is itself a module of this library is not in the table.
"""

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Module below ``aligner``: modules below ``aligner`` that have its names.
PATHS = {
    "algorithms.interfaces": "losses.interfaces",
    "algorithms.logits_sampling_utils": "logprobs.top_k_top_p",
    "algorithms.loss.interfaces": "losses.interfaces",
    "algorithms.loss.loss_functions": "losses.value losses.policy",
    "data.packing": "distributed.packing",
    "models.automodel.setup": "",  # nemo_automodel's
    "models.generation.interfaces": "models.interfaces",
    "models.nlp.gpt.megatron_gpt_critic": "models.gpt",
    "models.nlp.gpt.megatron_gpt_ppo_actor": "models.gpt",
    "models.nlp.gpt.megatron_gpt_reinforce_actor": "models.gpt",
    "models.nlp.gpt.megatron_gpt_reward_model": "models.gpt",
    "models.nlp.gpt.megatron_gpt_rs_actor": "models.gpt",
    "models.policy.dtensor_policy_worker": "models.policy.workers.dtensor_policy_worker_v2",
    "models.policy.interfaces": "models.interfaces",
    "models.policy.megatron_policy_worker": "models.policy.workers.megatron_policy_worker",
    "models.policy.workers.base_policy_worker": "models.worker",
    "models.policy.workers.dtensor_policy_worker": "models.policy.workers.dtensor_policy_worker_v2",
    "models.value.config": "compat.nemo_rl",
    "models.value.interfaces": "models.interfaces",
    "utils.utils": "models.gpt",
    # Of earlier versions of this library.
    "algorithms.losses.interfaces": "losses.interfaces",
    "algorithms.losses.policy": "losses.policy",
    "algorithms.losses.value": "losses.value",
    "batches.batched_data_dict": "distributed.batched_data_dict",
    "cluster.ray.session": "distributed.ray.session",
    "cluster.ray.virtual_cluster": "distributed.virtual_cluster",
    "cluster.worker_groups": "distributed.worker_groups distributed.workers",
    "config.elsewhere.translate": "compat.translate",
    "distributed.accelerator": "device.accelerator",
    "distributed.parallel": "parallel.groups",
}
_OTHER_NAMES = {
    "AbstractPolicyWorker": "RoleWorker",
    "DTensorPolicyWorker": "DTensorPolicyWorkerV2",
}


class PublishedPaths(MetaPathFinder, Loader):
    """Makes the modules of `PATHS`, and the packages that they are in."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of the table, or a package on the way to one."""
        del path, target
        below = name.removeprefix("aligner.")
        is_package = any(each.startswith(f"{below}.") for each in PATHS)
        return (
            ModuleSpec(name, self, is_package=is_package) if is_package or below in PATHS else None
        )

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the names of its homes, which are imported on first use."""
        name = module.__name__
        homes = PATHS.get(name.removeprefix("aligner."), "").split()
        module.__doc__ = f"The published place of what is in {', '.join(homes) or 'other modules'}."
        module.__dict__["__getattr__"] = partial(_named, name, homes)


def _named(module: str, homes: Sequence[str], name: str) -> Any:
    """The name in the first home that has it; ``__all__``: what the homes define."""
    if name == "__all__":
        modules = [importlib.import_module(f"aligner.{home}") for home in homes]
        return [
            own
            for home in modules
            for own, value in vars(home).items()
            if getattr(value, "__module__", None) == home.__name__
        ]
    if not name.startswith("__"):
        for home in homes:
            for own in (_OTHER_NAMES.get(name, name), name):
                try:
                    return getattr(importlib.import_module(f"aligner.{home}"), own)
                except AttributeError:
                    continue
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def install() -> None:
    """Let the paths be imported, after all modules that are files."""
    if not any(isinstance(finder, PublishedPaths) for finder in sys.meta_path):
        sys.meta_path.append(PublishedPaths())
