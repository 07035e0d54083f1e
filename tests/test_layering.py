"""Imports point down; folders, files and functions are small; what is confined stays confined.

A rule without a checker is no rule.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aligner"

# From the bottom up: a module imports from its own package and from those above it in this list.
# The longest name that fits is a module's package.
PACKAGES = [
    "aligner.compat",
    "aligner.errors",
    "aligner.types",
    "aligner.architecture",
    "aligner.plain",
    "aligner.user_files",
    "aligner.importing",
    "aligner.scratch",
    "aligner.child_process",
    "aligner.http",
    "aligner.catalog",
    "aligner.config",
    "aligner.kernels",
    "aligner.distributed",
    "aligner.batches",
    "aligner.losses",
    "aligner.logprobs",
    "aligner.data",
    "aligner.checkpoint",
    "aligner.observe",
    "aligner.cluster",
    "aligner.refit",
    "aligner.models.interfaces",
    "aligner.models.gpt.lora",
    "aligner.models.gpt.layers",
    "aligner.models.gpt.forward",
    "aligner.models.gpt.decode",
    "aligner.models.gpt.role",
    "aligner.models.gpt.megatron",
    "aligner.models.gpt.dtensor",
    "aligner.models.gpt",
    "aligner.models",
    "aligner.rewards",
    "aligner.environments",
    "aligner.generation",
    "aligner.serving",
    "aligner.algorithms",
    "aligner.dry",
    "aligner.plan",
    "aligner.commands",
]
MODULES_IN_A_FOLDER = 16
LINES_OF_A_FILE = 450
# Files with more, and the one thing that each of them is.
LONG_FILES = {
    "aligner/batches/batched_data_dict.py": "a batch and the operations on its columns",
    "aligner/models/gpt/decode/scheduler.py": "a rollout, its half on the host and on the device",
}
LINES_OF_A_FUNCTION = 60  # from ``def`` to its end, the docstring too
POSITIONAL_PARAMETERS = 7  # without ``self`` and ``cls``
# Functions whose arguments and their order others have published, and who: more than
# `POSITIONAL_PARAMETERS`, and docstrings that explain each are not counted.
_NEMO_RL = "NeMo-RL, see docs/published.md"
_PUBLISHED = "aligner.logprobs.published"
PUBLISHED_SIGNATURES = {
    f"{_PUBLISHED}.parallel_logprobs.from_parallel_logits_to_logprobs": _NEMO_RL,
    f"{_PUBLISHED}.parallel_logprobs.from_parallel_logits_to_logprobs_packed_sequences": _NEMO_RL,
    f"{_PUBLISHED}.dtensor_logprobs.dtensor_from_parallel_logits_to_logprobs": _NEMO_RL,
    f"{_PUBLISHED}.hidden_logprobs.from_parallel_hidden_states_to_logprobs": _NEMO_RL,
    f"{_PUBLISHED}.hidden_logprobs.ChunkedDistributedHiddenStatesToLogprobs.forward": _NEMO_RL,
    f"{_PUBLISHED}.logits_logprob.ChunkedDistributedLogprob.forward": _NEMO_RL,
    f"{_PUBLISHED}.logits_logprob.ChunkedDistributedGatherLogprob.forward": _NEMO_RL,
    f"{_PUBLISHED}.sampling_logprob.ChunkedDistributedLogprobWithSampling.forward": _NEMO_RL,
    f"{_PUBLISHED}.distillation.get_distillation_topk_logprobs_from_logits": _NEMO_RL,
    "aligner.models.policy.lm_policy.Policy.__init__": _NEMO_RL,
    "aligner.models.value.lm_value.Value.__init__": _NEMO_RL,
    f"{_PUBLISHED}.linear_ce_patch._gpt_forward_with_linear_ce_fusion": (
        "megatron-core: it stands for GPTModel.forward"
    ),
    "aligner.checkpoint.nemo.connector.GPTSaveRestoreConnector.restore_from": (
        "NeMo: ModelPT.restore_from passes all of them by position"
    ),
}
# Modules that only one other imports, and why they are no part of it.
ONE_IMPORTER = {
    "aligner.cluster.ray.virtual_cluster": "a cluster's bundles; published",
    "aligner.config.cli": "the entry of the scripts in examples/",
    "aligner.losses.policy": "a loss of its own; published",
    "aligner.models.policy.workers.dtensor_policy_worker_v2": "a worker, named by its path",
    "aligner.algorithms.rollout.agents": "processes and clocks, which know nothing of engines",
    "aligner.algorithms.rollout.endpoint": "agents in place of environments; imports FastAPI",
    "aligner.algorithms.distill.build": "an algorithm; its importers are commands",
    "aligner.algorithms.ppo.credit": "advantages and returns of a rollout",
    "aligner.algorithms.ppo.trainer": "an algorithm; its importers are commands",
    "aligner.algorithms.preference.build": "an algorithm; its importers are commands",
    "aligner.algorithms.preference.reference_logprobs": "a pass over a data set, and its file",
    "aligner.batches.packing": "a family of packers",
    "aligner.checkpoint.fingerprint": "a hash that reads a part of a file",
    "aligner.checkpoint.gathered_weights": "canonical weights from all ranks",
    "aligner.checkpoint.hf.gguf": "a format of files",
    "aligner.checkpoint.hf.peft": "a format of files",
    "aligner.checkpoint.nemo.artifacts": "small files in an archive",
    "aligner.checkpoint.nemo.connector": "the only file that imports NeMo",
    "aligner.checkpoint.nemo.inflated": "a cache of unpacked archives",
    "aligner.checkpoint.nemo.mapped_tensors": "torch files in mapped memory",
    "aligner.checkpoint.nemo.weights": "weights of an archive by their names",
    "aligner.checkpoint.nemo.zarr_v2": "a format of files",
    "aligner.cluster.heartbeat": "ranks notice that another died",
    "aligner.cluster.launch": "processes beside the first",
    "aligner.cluster.ray.calls": "waiting for workers, and their errors",
    "aligner.cluster.ray.session": "a connection to Ray",
    "aligner.cluster.ray.worker_group": "workers; its importer places them",
    "aligner.config.commands.pipeline": "options of a command",
    "aligner.config.rules.correction": "rules of one noun",
    "aligner.config.rules.credit": "rules of one noun",
    "aligner.config.rules.examples": "rules of one kind of run",
    "aligner.user_files": "modules of users' files, found by name in every process",
    "aligner.config.rules.unused": "a table of options that a run does not read",
    "aligner.data.tokenizers.byte_tokenizer": "a tokenizer without files; tasks have it too",
    "aligner.data.tokenizers.sentencepiece": "a kind of tokenizer",
    "aligner.distributed.megatron_substitutes": "patches of megatron-core",
    "aligner.dry.device": "the device, which tests and benchmarks enter",
    "aligner.dry.driver": "what torch.cuda calls",
    "aligner.dry.rules": "what a GPU's kernels refuse",
    "aligner.generation.vllm.engine": "one engine; its importer is an actor",
    "aligner.generation.vllm.generation": "the handle of the engines",
    "aligner.generation.vllm.sampling": "sampling parameters as vLLM's",
    "aligner.generation.vllm.worker": "the actor that holds an engine",
    "aligner.logprobs.published.distillation": "a published function",
    "aligner.logprobs.published.hidden_logprobs": "published functions",
    "aligner.logprobs.published.vocab_entropy": "published functions",
    "aligner.logprobs.vocab_sequence_exchange": "published functions",
    "aligner.losses.groups": "sums and deviations inside groups, which name no estimator",
    "aligner.losses.preference": "a family of losses",
    "aligner.losses.user": "a user's loss, tried before a run",
    "aligner.models.gpt.decode.generator": "the sampling engine; a policy asks it",
    "aligner.models.gpt.decode.layers": "a short cut through layers, kind by kind",
    "aligner.models.gpt.dtensor.actor": "a role; its importer is a worker",
    "aligner.models.gpt.dtensor.attention": "a function that transformers calls",
    "aligner.models.gpt.dtensor.build": "twin of megatron's; its importer is the model",
    "aligner.models.gpt.dtensor.critic": "a role; its importer is a worker",
    "aligner.models.gpt.dtensor.state": "twin of megatron's; its importer is the model",
    "aligner.models.gpt.layers.layer_spec": "modules of a layer; its importer builds models",
    "aligner.models.gpt.layers.varlen": "kernels of a GPU, found at run time",
    "aligner.models.gpt.megatron.loading": "a published function over all roles",
    "aligner.models.gpt.megatron.state": "twin of dtensor's; its importer is the model",
    "aligner.models.policy.workers.megatron_policy_worker": "a published path",
    "aligner.models.reward.workers.megatron_reward_worker": "a published path",
    "aligner.models.value.workers.dtensor_value_worker_v2": "a published path",
    "aligner.models.value.workers.megatron_value_worker": "a published path",
    "aligner.observe.progress": "a line on the terminal",
    "aligner.observe.report.conversation": "messages of a sample, which know nothing of pages",
    "aligner.observe.report.evaluation": "a page of the report",
    "aligner.observe.report.run": "a page of the report",
    "aligner.plan.layouts": "candidates of a search",
    "aligner.plan.sampling": "roles of runs that sample",
    "aligner.plan.search": "the search; its importer is a command",
    "aligner.plan.supervised": "roles of runs that do not sample",
    "aligner.plan.work": "arithmetic of a layer",
    "aligner.rewards.function.runner": "a reward function, ready to score",
    "aligner.rewards.server.client": "one end of the wire",
    "aligner.rewards.server.http": "requests and answers, which know nothing of models",
    "aligner.serving.exchange": "one request, which knows nothing of routes",
}
# What a role is asked to do. A handle declares it (`phase`, `scored_rows`): definitions are
# an interface's, a worker's and a role model's, or another engine's.
VERBS = [
    "train",
    "training_update",
    "get_loss_and_metrics",
    "prepare_for_training",
    "finish_training",
    "prepare_for_inference",
    "finish_inference",
    "prepare_for_lp_inference",
    "infer",
    "infer_rm_critic",
    "prepare_for_generation",
    "finish_generation",
    "generate",
    "offload_before_refit",
    "offload_after_refit",
    "get_logprobs",
    "get_reference_policy_logprobs",
    "get_init_policy_logprobs",
    "get_topk_logits",
    "get_values",
    "get_rewards",
    "save_checkpoint",
    "load_checkpoint",
]
DEFINITIONS_OF_A_VERB = 4
MORE_DEFINITIONS = {
    # Two are functions: the command, and a stage of a rollout; one is an engine's rounds ahead.
    "generate": 7,
    "prepare_for_generation": 5,
    "finish_generation": 5,
    "get_rewards": 8,  # one of workers; the others are sources of rewards, one in another's place
}
CONFINED = {
    "omegaconf": ["aligner/config/", "examples/", "tests/"],
    "hydra": ["aligner/config/", "examples/", "tests/"],
    "ray": ["aligner/cluster/ray/"],
    "vllm": ["aligner/generation/vllm/"],
    "nemo": ["aligner/checkpoint/nemo/connector.py", "aligner/models/gpt/megatron/model.py"],
    "fastapi": ["aligner/http/", "aligner/rewards/server/", "aligner/serving/"],
    "httpx": ["aligner/rewards/server/"],
    "tenacity": ["aligner/rewards/server/"],
    "uvicorn": ["aligner/http/"],
}


@cache
def modules():
    return sorted(PACKAGE.rglob("*.py"))


@cache
def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place_of(module):
    """Index of the longest name of `PACKAGES` that fits; None for the package itself."""
    fitting = [p for p in PACKAGES if module == p or module.startswith(f"{p}.")]
    return PACKAGES.index(max(fitting, key=len)) if fitting else None


@cache
def imports_of(path):
    """Absolute names of everything a file imports, wherever in it, with line numbers."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.module, node.lineno))
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def relative(path):
    return path.relative_to(ROOT).as_posix()


def test_every_package_of_the_list_is_there():
    assert len(set(PACKAGES)) == len(PACKAGES)
    assert set(PACKAGES) <= {name_of(path) for path in modules()}


def test_every_module_has_a_place():
    assert [name_of(p) for p in modules() if place_of(name_of(p)) is None] == ["aligner"]


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_imports_point_down(path):
    own = place_of(name_of(path))
    if own is None:
        return
    upward = [
        f"line {line}: {name}"
        for name, line in imports_of(path)
        if name.startswith("aligner.") and (place_of(name) or 0) > own
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions and for type checkers count too."""
    names = {name_of(path) for path in modules()}
    needs = {name_of(path): modules_needed(path, names) for path in modules()}
    # Modules that need none that is left go, again and again; circles and what needs them stay.
    while ready := [name for name, needed in needs.items() if not needed]:
        for name in ready:
            del needs[name]
        for needed in needs.values():
            needed.difference_update(ready)
    assert {name: sorted(needed) for name, needed in needs.items()} == {}


def test_what_one_module_imports_is_part_of_it_or_a_thing_of_its_own():
    """A module with one importer is merged into it, or stands in `ONE_IMPORTER` with a reason."""
    names = {name_of(path) for path in modules()}
    importers = Counter(needed for path in modules() for needed in modules_needed(path, names))
    covered = {name for name, count in importers.items() if count == 1}
    assert sorted(covered) == sorted(ONE_IMPORTER)


def modules_needed(path, names):
    """Modules that a file imports: of ``from package import module`` the module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in names else node.module for name in full}
    return found & names - {name_of(path)}


def test_no_folder_has_many_modules():
    sizes = Counter(relative(p.parent) for p in modules() if p.name != "__init__.py")
    assert {folder: n for folder, n in sizes.items() if n > MODULES_IN_A_FOLDER} == {}


def test_no_file_is_long():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in modules()}
    assert {file for file, n in lengths.items() if n > LINES_OF_A_FILE} == set(LONG_FILES)


def test_no_function_is_long():
    long = {}
    for name, function, _ in functions():
        lines = function.end_lineno - function.lineno + 1
        if name in PUBLISHED_SIGNATURES and ast.get_docstring(function) is not None:
            docstring = function.body[0]
            lines -= docstring.end_lineno - docstring.lineno + 1
        if lines > LINES_OF_A_FUNCTION:
            long[name] = lines
    assert long == {}


def test_no_function_has_many_positional_parameters():
    """The rest are keywords, or an object where several functions hand the same ones on."""
    many = {
        name: [each.arg for each in positional]
        for name, _, positional in functions()
        if len(positional) > POSITIONAL_PARAMETERS
    }
    assert {name: found for name, found in many.items() if name not in PUBLISHED_SIGNATURES} == {}
    assert set(PUBLISHED_SIGNATURES) == set(many), "a name that needs no exception"


def test_a_verb_is_defined_once_a_layer():
    counts = Counter(name.rpartition(".")[2] for name, _, _ in functions())
    allowed = dict.fromkeys(VERBS, DEFINITIONS_OF_A_VERB) | MORE_DEFINITIONS
    assert {verb: counts[verb] for verb in VERBS if counts[verb] > allowed[verb]} == {}
    assert [verb for verb in VERBS if counts[verb] == 0] == []
    needed = [verb for verb in VERBS if counts[verb] > DEFINITIONS_OF_A_VERB]
    assert set(MORE_DEFINITIONS) == set(needed), "a verb that needs no exception"


def functions():
    """(full name, its node, its positional parameters) of every function, nested ones too."""
    return [each for path in modules() for each in _functions_in(path)]


@cache
def _functions_in(path):
    found = []

    def visit(node, prefix, in_class):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                positional = [*child.args.posonlyargs, *child.args.args]
                if in_class and not _is_static(child):
                    positional = positional[1:]
                found.append((f"{prefix}.{child.name}", child, positional))
                visit(child, f"{prefix}.{child.name}", False)
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}.{child.name}", True)
            else:
                visit(child, prefix, in_class)

    visit(ast.parse(path.read_text()), name_of(path), False)
    return found


def _is_static(function):
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)


@pytest.mark.parametrize("package", CONFINED)
def test_packages_stay_confined(package):
    allowed = CONFINED[package]
    strays = [
        f"{relative(path)}:{line}"
        for path in [*modules(), *sorted((ROOT / "examples").glob("*.py"))]
        if not relative(path).startswith(tuple(allowed))
        for name, line in imports_of(path)
        if name.split(".")[0] == package
    ]
    assert strays == []


def test_only_the_device_seam_mentions_cuda():
    strays = [
        f"{relative(path)}:{node.lineno}"
        for path in modules()
        # The dry device stands in for what the seam calls.
        if relative(path) != "aligner/distributed/accelerator.py"
        and not relative(path).startswith("aligner/dry/")
        for node in ast.walk(ast.parse(path.read_text()))
        if _mentions_cuda(node)
    ]
    assert strays == []


def _mentions_cuda(node):
    if isinstance(node, ast.Attribute):
        return node.attr == "cuda"
    if isinstance(node, ast.Constant):  # device="cuda", not prose
        return isinstance(node.value, str) and (node.value == "cuda" or node.value[:5] == "cuda:")
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return any(name.startswith("torch.cuda") for name in names)


def test_entry_scripts_are_short():
    long = [
        f"{relative(path)}: {len(path.read_text().splitlines())} lines"
        for path in sorted((ROOT / "examples").glob("train_*.py"))
        if len(path.read_text().splitlines()) > 40
    ]
    assert long == []
