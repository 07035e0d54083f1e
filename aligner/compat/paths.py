"""Published import paths: one table of the modules that have their names, and its importer.

A path of NeMo-RL or NeMo-Aligner, with ``nemo_rl`` or ``nemo_aligner`` replaced by ``aligner``, is
a module with the names of its homes; so is the earlier path of a module that moved. Only a module
that lost some of its names, and calls `published` for them, is both a file and in the table.

``aligner.examples`` is the folder `examples`, which a wheel has below ``aligner`` and a checkout
next to it.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_EXAMPLES = Path(__file__).parents[2] / "examples"
# Modules of tasks that were part of the library, and where each is now.
MOVED = {
    "data.arithmetic": "examples.tasks.arithmetic",
    "data.form_pairs": "examples.tasks.form_pairs",
    "data.gsm8k": "examples.tasks.gsm8k",
    "data.gsm8k_solutions": "examples.tasks.gsm8k_solutions",
    "environments.games": "examples.tasks.games",
    "environments.search": "examples.tasks.search",
    "checkpoint.tiny": "examples.tasks.tiny_model",
    "environments.interpreter": "examples.tasks.python_tool",
    "environments.traces": "examples.tasks.calculator",
    "data.reasoning_gym": "examples.tasks.reasoning",
    "rewards.reasoning_gym": "examples.tasks.reasoning",
    "environments.tools": "examples.tasks.calculator",  # a part of it
    "rewards.exact_number": "examples.tasks.exact_number",
}
# Module below ``aligner``: modules below ``aligner`` that have its names.
PATHS = {
    **MOVED,
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


class PublishedPaths(MetaPathFinder, InspectLoader):
    """Makes the modules of `PATHS`, the packages that they are in, and ``aligner.examples``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of the table, or a package on the way to one."""
        del path, target
        below = name.removeprefix("aligner.")
        if name == "aligner.examples" and _EXAMPLES.is_dir():
            folder = ModuleSpec(name, None, is_package=True)
            folder.submodule_search_locations = [str(_EXAMPLES)]
            return folder
        is_package = any(each.startswith(f"{below}.") for each in PATHS)
        if not is_package and below not in PATHS:
            return None
        origin = " ".join(_homes(name))  # the name of the program to which `python -m` gives way
        return ModuleSpec(name, self, origin=origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the names of its homes, which are imported on first use."""
        homes = _homes(module.__name__)
        module.__doc__ = f"The published place of what is in {', '.join(homes) or 'other modules'}."
        module.__dict__["__getattr__"] = partial(_named, module.__name__)

    def get_code(self, fullname: str) -> CodeType | None:
        """Code of the first home, which ``python -m`` runs."""
        spec = find_spec(f"aligner.{_homes(fullname)[0]}")
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(spec.name)

    def get_source(self, fullname: str) -> None:
        """None: a module of the table has no text."""


def published(module: str, name: str) -> Any:
    """A name that ``module`` does not define, in the first home of its path that has it.

    Raises:
        AttributeError: none has it.
    """
    if not name.startswith("__"):
        for home in _homes(module):
            for own in (_OTHER_NAMES.get(name, name), name):
                try:
                    return getattr(importlib.import_module(f"aligner.{home}"), own)
                except AttributeError:
                    continue
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def current_path(text: str) -> str:
    """Text with the earlier paths of modules that moved replaced by the present ones."""
    return _MOVED_PATH.sub(lambda path: f"aligner.{MOVED[path[1]]}", text)


_MOVED_PATH = re.compile(rf"\baligner\.({'|'.join(map(re.escape, MOVED))})\b")


def _homes(module: str) -> list[str]:
    return PATHS.get(module.removeprefix("aligner."), "").split()


def _named(module: str, name: str) -> Any:
    """A name of a module of the table; ``__all__``: what its homes define."""
    if name != "__all__":
        return published(module, name)
    homes = [importlib.import_module(f"aligner.{home}") for home in _homes(module)]
    return [
        own
        for home in homes
        for own, value in vars(home).items()
        if getattr(value, "__module__", None) == home.__name__
    ]


def install() -> None:
    """Let the paths be imported, after all modules that are files."""
    if not any(isinstance(finder, PublishedPaths) for finder in sys.meta_path):
        sys.meta_path.append(PublishedPaths())
