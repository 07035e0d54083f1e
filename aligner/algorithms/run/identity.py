"""Identity of a run: settings that define the optimisation, and settings that may change."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from aligner.catalog import ENGINES
from aligner.compat.paths import current_path
from aligner.config import BaseRunConfig
from aligner.config.algorithms.names import Algorithm, algorithm_of
from aligner.data.readers import Source, source_files
from aligner.errors import CheckpointError, DataError, raised_as

# Patterns of keys that may change between two starts of a run. All other keys identify the run.
MAY_CHANGE = (
    # processes, engines, outputs and time limits
    *("dry_run", "download", "exp_manager.*", "cluster.*", "policy.backend", "validation.*"),
    *("generation.backend", "generation.cuda_graphs", "generation.in_flight"),
    *("generation.kwargs.*", *(f"generation.{engine}.*" for engine in ENGINES)),
    *("trainer.num_nodes", "trainer.devices", "trainer.deterministic", "trainer.max_time"),
    *("trainer.callbacks*", "data.validation*"),
    # the length of the run
    *("trainer.*.max_epochs", "trainer.*.max_steps", "trainer.*_interval", "trainer.*.limit_*"),
    *("trainer.*.non_finite", "trainer.*.max_skipped_steps"),
    # batches, layout and memory
    *("*micro_batch_size", "*.global_batch_size", "model.*.num_rollout_samples", "*.fusions"),
    *("*_parallel_size", "*_pipeline_stage", "*.sequence_parallel", "*.sequence_packing.*"),
    *("*.dynamic_batching.*", "*.shared_prefixes", "*.activations_checkpoint_*", "*.layer_spec"),
    *("*.overlap_*", "*.offload_*", "model.*.record_kept_tokens", "model.reference.mode"),
    # learning rates and their horizon
    *("*.optim.lr", "*.optim.min_lr", "*.optim.sched.*"),
    # time limits and processes of rewards and environments
    *("reward.time_limit_s", "reward.max_concurrency", "reward.model.workers"),
    *("reward.model.share_body_with_critic", "reward.server.*_s", "reward.server.*requests*"),
    *("reward.server.token_*", "reward.server.samples_per_request", "environment.*timeout_s"),
    *("environment.concurrency", "environment.memory_mb", "environment.retries"),
)
# Attributes of `RunIdentity`, with the value of ``accept_changed`` that accepts a difference.
_CONTENTS = {"models": "model", "data": "data", "sources": ""}
_ACCEPT = " ('exp_manager.accept_changed=[{}]' continues nevertheless)"
# Blocks of a fingerprint, and their bytes. A file of up to 4 MiB is read completely.
_BLOCKS, _BLOCK = 64, 1 << 16
# Mappings whose keys the user defines.
_USER_MAPPINGS = ("kwargs", "loss_kwargs", "arguments", "chat_template_kwargs")


@dataclass(frozen=True)
class RunIdentity:
    """Properties that must not change when a run is continued.

    ``models``, ``data`` and ``sources`` (the user's code) map a configuration key to a path and a
    fingerprint of the content (None if the file cannot be read). ``settings``: all values except
    `MAY_CHANGE`, by dotted key.
    """

    algorithm: Algorithm
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: BaseRunConfig) -> "RunIdentity":
        """Return the identity of a run with the configuration ``config``."""
        plain = config.as_dict()
        settings, models, sources = identity_settings(plain), {}, {}
        for key, value in settings.items():
            if key.endswith(".restore_from_path") and value is not None:
                models[key] = _content(value, model_fingerprint(value))
            if content := _code_content(key, value):
                sources[key] = _content(value, content)
        source = plain["data"]["train"]["source"]
        data = {"data.train.source": _content(source, _data_content(source))}
        return cls(algorithm_of(plain), models, data, sources, settings)

    @classmethod
    def saved(cls, state: Mapping[str, Any]) -> "RunIdentity":
        """Return the identity of the run that wrote the run state ``state``."""
        saved = state.get("identity", {})
        models, data, sources = (saved.get(name, {}) for name in _CONTENTS)
        damage = (KeyError, StopIteration, AttributeError, TypeError)
        text = "the run state does not contain the configuration of a training run"
        remedy = "set exp_manager.explicit_log_dir to another directory"
        with raised_as(CheckpointError, text, *damage, remedy=remedy):
            config = state["config"]
            settings = identity_settings(config)
            data = {key: _content(part["source"], part["content"]) for key, part in data.items()}
            # Earlier versions included a generator's arguments.
            for part in data.values():
                if str(part["content"]).startswith("[["):
                    part["content"] = json.dumps(json.loads(part["content"])[0])
            return cls(algorithm_of(config), models, data, sources, settings)

    def as_dict(self) -> dict[str, Any]:
        """Return the identity in JSON types."""
        return {**asdict(self), "algorithm": self.algorithm._asdict()}

    def refusals(
        self,
        saved: "RunIdentity",
        accepted: Sequence[str],  # exp_manager.accept_changed: kinds of content that may differ
        changed: Sequence[str] = (),  # exp_manager.resume_changed: keys that may differ
        defaults: Mapping[str, Any] | None = None,  # defaults of the current version
    ) -> list[str]:
        """Return reasons why this run cannot continue the run ``saved``. Empty if it can."""
        new, old = self.algorithm, saved.algorithm
        reason = f"its algorithm is {old.name} and the algorithm of this command is {new.name}"
        if new[1:] != old[1:]:
            return [reason]
        # Collect the differences, except of keys that may differ.
        is_same, sections = new.name == old.name, [f"trainer.{new.section}", f"model.{new.section}"]
        keys_of = {"data": ["data.train"], "algorithm": [] if is_same else sections}
        accepted_keys = [key for kind in accepted for key in keys_of.get(kind, self.models)]
        may_differ = [*changed, *accepted_keys]
        differing = {
            key: text
            for key, text in self._differences(saved, flat(defaults or {}))
            if not any(_is_below(key, name) for name in may_differ)
        }
        # Each reason says which setting accepts the difference.
        if not differing:
            return []
        reasons = list(differing.values())
        if not is_same and "algorithm" not in accepted:
            reasons = [f"{reason}{_ACCEPT.format('algorithm')}", *reasons]
        changes = f"'exp_manager.resume_changed=[{','.join(differing)}]' accepts the changed keys"
        return [*reasons, changes]

    def _differences(
        self, saved: "RunIdentity", defaults: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield key and description of each difference. ``defaults``: by dotted key."""
        parts = [(name, getattr(self, name), getattr(saved, name)) for name in _CONTENTS]
        for key in sorted(self.settings.keys() | saved.settings.keys()):
            value, saved_value = self.settings.get(key), saved.settings.get(key)
            missing = _content(saved_value, None)
            pairs = {
                name: (new[key], old.get(key, missing)) for name, new, old in parts if key in new
            }
            # Compare files by content, and other settings by value.
            if not pairs:
                if value != saved_value and not self._exists_in_one_version(key, saved, defaults):
                    yield key, f"{key}: {saved_value} -> {value}"
            elif not all(_same_content(*pair) for pair in pairs.values()):
                path = next(iter(pairs.values()))[1]["source"]
                accept = [_ACCEPT.format(_CONTENTS[name]) for name in pairs if _CONTENTS[name]]
                text = f"its {key} was {path}, but {key}={value} has different content"
                yield key, "".join([text, *accept])

    def _exists_in_one_version(
        self, key: str, saved: "RunIdentity", defaults: Mapping[str, Any]
    ) -> bool:
        """Return whether ``key`` differs only because another version of the library lacks it."""
        if any(name in key.split(".") for name in _USER_MAPPINGS):
            return False
        if key not in saved.settings:
            replaced = any(_is_below(old, key) for old in saved.settings)
            return not replaced and self.settings[key] in (defaults.get(key), [], None)
        return key not in self.settings and not any(_is_below(key, name) for name in self.settings)


def identity_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must not change when a run is continued, by dotted key."""
    return {
        key: value
        for key, value in flat(config).items()
        if not any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)
    }


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys, and convert old import paths to current paths."""
    if not isinstance(tree, Mapping):
        return {prefix: _current(tree)}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def _current(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_current, value))
    return current_path(value) if isinstance(value, str) else value


def _is_below(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def _content(source: Any, content: str | None) -> dict[str, Any]:
    return {"source": source, "content": content}


def _same_content(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Compare contents and function names. If one content is unknown, compare file names only."""
    sources = [entry["source"] for entry in (new, old)]
    sources = [source if isinstance(source, list) else [source] for source in sources]
    names = [[str(part).rpartition("/")[2] for part in parts] for parts in sources]
    if None in (new["content"], old["content"]):
        return names[0] == names[1]
    functions = [[name.partition(":")[2] for name in part] for part in names]
    return _current(new["content"]) == _current(old["content"]) and functions[0] == functions[1]


def _code_content(key: str, value: Any) -> str | None:
    """Return a fingerprint of the user's files in a setting, or None if there are no files."""
    if not isinstance(value, str | list):
        return None
    # Only some words of a command are files.
    is_command = key == "environment.command"
    words = value.split() if is_command and isinstance(value, str) else value
    files: list[Path] = []
    for word in [words] if isinstance(words, str) else map(str, words):
        location, separator, _ = word.rpartition(":")
        path = Path(location if separator else word).expanduser()
        if key == "environment.chat_template" or path.suffix in (".py", ".sh"):
            files.append(path)
        elif key == "model.tokenizer" and path.exists():
            files += [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*")))
        elif not is_command:
            module = location if separator else word.rpartition(".")[0]
            if module.partition(".")[0] != "aligner":
                files += filter(Path.is_file, [module_file(module)])
    return fingerprint_of(files) if files else None


def module_file(module: str) -> Path:
    """Find the file of a module without importing it. Return ``Path("")`` if there is none."""
    folders: Sequence[str] | None = ["", *sys.path]
    spec = None
    for name in module.split("."):
        spec = PathFinder.find_spec(name, folders) if folders and name.isidentifier() else None
        folders = None if spec is None else spec.submodule_search_locations
    return Path((spec and spec.origin) or "")


def _data_content(source: Source) -> str | None:
    """Return a fingerprint of a source's files and generators, or None if one is unreadable."""
    contents = []
    for part in [source] if isinstance(source, (str, Path)) else source:
        try:
            files = source_files(part)
            # A generator's file may move to another folder.
            contents.append(Path(str(part)).name if files is None else fingerprint_of(files))
        except (DataError, OSError):  # the reader reports the error
            return None
    return None if None in contents else json.dumps(contents)


def file_fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file's size and evenly spaced blocks. Training changes all blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(f"{size} ".encode())
        if size <= _BLOCKS * _BLOCK:
            digest.update(file.read())
        else:
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def model_fingerprint(source: str) -> str | None:
    """Return a fingerprint of a model file or directory, or None if there is none."""
    path = Path(source).expanduser()
    if path.is_file():
        return fingerprint_of([path])
    if any((path / name).is_file() for name in ("config.json", "model_config.yaml")):
        return fingerprint_of(sorted(file for file in path.rglob("*") if file.is_file()))
    return None


def fingerprint_of(files: Sequence[Path]) -> str | None:
    """Return a fingerprint of the contents of ``files``, or None if one cannot be read."""
    try:
        return hashlib.sha256(json.dumps([*map(file_fingerprint, files)]).encode()).hexdigest()[:32]
    except OSError:
        return None
