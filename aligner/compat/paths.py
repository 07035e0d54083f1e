"""Importer for published import paths that have no file here.

A published path is a module of NeMo-RL or NeMo-Aligner, with ``nemo_rl`` or ``nemo_aligner``
replaced by ``aligner``, or an earlier path of a moved module. Importing it gives a module with the
names of its target modules in `PATHS`. A module from which only some names were moved is a file,
and calls `published` for these names. ``aligner.examples`` is the folder `examples` next to the
package, unless the package contains one.
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
# Earlier path of a module of the library → path of the task or environment now.
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
    "environments.sandbox": "examples.tasks.sandbox",
    "data.reasoning_gym": "examples.tasks.reasoning",
    "rewards.reasoning_gym": "examples.tasks.reasoning",
    "environments.tools": "examples.tasks.calculator",  # some of its names
    "rewards.exact_number": "examples.tasks.exact_number",
    "environments.adapters.functions": "environments.functions",
    **{
        f"environments.adapters.{name}": f"aligner_environments.{name}"
        for name in ("gymnasium", "mcp", "nemo_rl", "openenv", "skyrl_gym", "trl", "verifiers")
    },
    "environments.adapters.verifiers_agent": "aligner_environments.verifiers_agent",
}
_MODEL_UTILS = [
    f"distributed.model_utils.{name}"
    for name in (
        *("context_shard", "distillation", "distributed_softmax", "dtensor_logprobs"),
        *("hidden_logprobs", "linear_ce_patch", "logits_logprob", "parallel_logprobs"),
        *("vocab_entropy", "vocab_topk"),
    )
]
# Published path → modules that define its names. Both are below ``aligner``, unless the name of the
# module begins with another package of the project.
PATHS = {
    **MOVED,
    "algorithms.interfaces": "losses.interfaces",
    "algorithms.logits_sampling_utils": "logprobs.top_k_top_p",
    "algorithms.loss.interfaces": "losses.interfaces",
    "algorithms.loss.loss_functions": "losses.value losses.policy",
    "data.packing": "distributed.packing",
    "distributed.model_utils": " ".join(
        (*_MODEL_UTILS, "logprobs.fused logprobs.top_k_top_p logprobs.vocab_sequence_exchange")
    ),
    "models.automodel.setup": "",  # a path of nemo_automodel
    "models.generation.interfaces": "models.interfaces",
    **{
        f"models.nlp.gpt.megatron_gpt_{role}": "models.gpt"
        for role in ("critic", "ppo_actor", "reinforce_actor", "reward_model", "rs_actor")
    },
    "models.policy.dtensor_policy_worker": "models.policy.lm_policy",
    "models.policy.interfaces": "models.interfaces",
    "models.policy.megatron_policy_worker": "models.policy.lm_policy",
    "models.policy.workers.base_policy_worker": "models.worker",
    **{
        f"models.policy.workers.{name}": "models.policy.lm_policy"
        for name in (
            *("dtensor_policy_worker", "dtensor_policy_worker_v2", "megatron_policy_worker"),
            "policy_worker",
        )
    },
    "models.value.config": "config.translation.nemo_rl",
    "models.value.interfaces": "models.interfaces",
    "models.value.workers.dtensor_value_worker_v2": "losses.value",
    "models.value.workers.megatron_value_worker": (
        "models.value.workers.value_worker models.gpt.megatron.critic logprobs.output_layer"
    ),
    "utils.utils": "models.gpt",
    # Paths of earlier versions of this library.
    **{f"algorithms.losses.{name}": f"losses.{name}" for name in ("interfaces", "policy", "value")},
    **{
        f"batches.{name}": f"distributed.{name}"
        for name in ("batched_data_dict", "packing", "sharding")
    },
    "cluster.named_sharding": "distributed.named_sharding",
    "cluster.ray.session": "distributed.ray.session",
    "cluster.ray.virtual_cluster": "distributed.virtual_cluster",
    "cluster.ray.worker_group": "distributed.worker_groups",
    "cluster.worker_groups": "distributed.worker_groups distributed.workers",
    "config.elsewhere.nemo_aligner": "compat.nemo_aligner",
    **{f"{name}.nemo_rl": "config.translation.nemo_rl" for name in ("compat", "config.elsewhere")},
    **{
        f"{name}.translate": "config.translation.command" for name in ("compat", "config.elsewhere")
    },
    **{
        name.replace("distributed.model_utils", "logprobs.published"): name for name in _MODEL_UTILS
    },
    "data.labelled": "data.preferences",
    "data.ratings": "data.preferences",
    "distributed.accelerator": "device.accelerator",
    "distributed.parallel": "parallel.groups",
    "models.gpt.role.value": "logprobs.output_layer models.gpt.role.model",
    "losses.kl": "losses.policy algorithms.ppo.credit",
    "observe.metric_names": "observe.metrics",
    "observe.packages": "packages",
    "observe.samples": "observe.metrics observe.progress",
}
# Published name of a class or function → name here.
_OTHER_NAMES = {
    "AbstractPolicyWorker": "RoleWorker",
    "DTensorPolicyWorker": "DTensorPolicyWorkerV2",
    "_RightShiftLossWrapper": "RightShiftedLoss",
    "_ValueOutputLayerBypass": "CapturingOutputLayer",
    "_right_shift_values": "right_shift_values",
    "_unwrap_model": "unwrap_model",
}


class PublishedPaths(MetaPathFinder, InspectLoader):
    """Import finder and loader for published module paths in `PATHS` and ``aligner.examples``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a published module or a package above it, None for others."""
        del path, target
        below = name.removeprefix("aligner.")
        if name == "aligner.examples" and _EXAMPLES.is_dir():
            folder = ModuleSpec(name, None, is_package=True)
            folder.submodule_search_locations = [str(_EXAMPLES)]
            return folder
        is_package = any(path.startswith(f"{below}.") for path in PATHS)
        if not is_package and below not in PATHS:
            return None
        origin = " ".join(_targets(name))  # shown as the name of a program by `python -m`
        return ModuleSpec(name, self, origin=origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Define the module's ``__getattr__``, which imports its target modules at first use."""
        targets = _targets(module.__name__)
        module.__doc__ = f"Published path of {', '.join(targets) or 'other modules'}."
        module.__dict__["__getattr__"] = partial(attribute, module.__name__)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module's first target, for ``python -m``."""
        spec = find_spec(_targets(fullname)[0])
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(spec.name)

    def get_source(self, fullname: str) -> None:
        """Return None, because these modules have no source file."""


def published(module: str, name: str) -> Any:
    """Return the object ``name`` from the first target of ``module`` that defines it.

    `PATHS` lists the targets of a published module. Raises `AttributeError` if none defines it.
    """
    if not name.startswith("__"):
        for target in _targets(module):
            for candidate in (_OTHER_NAMES.get(name, name), name):
                try:
                    return getattr(importlib.import_module(target), candidate)
                except AttributeError:
                    continue
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def current_path(text: str) -> str:
    """Replace earlier module paths in ``text`` by the current paths."""
    return _MOVED_PATH.sub(lambda path: _full_name(MOVED[path[1]]), text)


_MOVED_PATH = re.compile(rf"\baligner\.({'|'.join(map(re.escape, MOVED))})\b")


def _targets(module: str) -> list[str]:
    return [_full_name(name) for name in PATHS.get(module.removeprefix("aligner."), "").split()]


def _full_name(target: str) -> str:
    return target if target.startswith("aligner_") else f"aligner.{target}"


def attribute(module: str, name: str) -> Any:
    """Return the object ``name`` of a published module, or for ``__all__`` the names it defines."""
    if name != "__all__":
        return published(module, name)
    targets = [importlib.import_module(target) for target in _targets(module)]
    return [
        attribute
        for target in targets
        for attribute, value in vars(target).items()
        if getattr(value, "__module__", None) == target.__name__
    ]


def install() -> None:
    """Make the published module paths importable. Existing module files have precedence."""
    if not any(isinstance(finder, PublishedPaths) for finder in sys.meta_path):
        sys.meta_path.append(PublishedPaths())
