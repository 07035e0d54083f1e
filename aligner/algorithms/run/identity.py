"""Identity of a run: what defines what is optimised, and what may change when it continues."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from aligner.catalog import ENGINES
from aligner.checkpoint.fingerprint import fingerprint_of, model_fingerprint
from aligner.compat.paths import current_path
from aligner.config import BaseRunConfig
from aligner.config.algorithms.names import Algorithm, algorithm_of
from aligner.data.readers import Source, source_files
from aligner.errors import CheckpointError, DataError

# Patterns of the keys that may change between two starts of a run; any other is its identity.
MAY_CHANGE = (
    # processes, engines, outputs and waits
    *("dry_run", "exp_manager.*", "cluster.*", "policy.backend", "validation.*"),
    *("generation.backend", "generation.cuda_graphs", "generation.in_flight"),
    *("generation.kwargs.*", *(f"generation.{engine}.*" for engine in ENGINES)),
    *("trainer.num_nodes", "trainer.devices", "trainer.deterministic", "trainer.max_time"),
    *("trainer.callbacks*", "data.validation*"),
    # the length of the run
    *("trainer.*.max_epochs", "trainer.*.max_steps", "trainer.*_interval", "trainer.*.limit_*"),
    *("trainer.*.non_finite", "trainer.*.max_skipped_steps"),
    # batches, layout and memory
    *("*micro_batch_size", "*.global_batch_size", "model.*.num_rollout_samples"),
    *("*_parallel_size", "*_pipeline_stage", "*.sequence_parallel"),
    *("*.sequence_packing.*", "*.dynamic_batching.*"),
    *("*.shared_prefixes", "*.activations_checkpoint_*", "*.layer_spec", "*.fusions"),
    *("*.overlap_*", "*.offload_*", "model.*.record_kept_tokens", "model.reference.mode"),
    # learning rates and their horizon
    *("*.optim.lr", "*.optim.min_lr", "*.optim.sched.*"),
    # waits and processes of rewards and environments
    *("reward.time_limit_s", "reward.max_concurrency", "reward.model.workers"),
    *("reward.model.share_body_with_critic", "reward.server.*_s", "reward.server.*requests*"),
    *("reward.server.token_*", "reward.server.samples_per_request", "environment.*timeout_s"),
    *("environment.concurrency", "environment.memory_mb", "environment.retries"),
)
_CONTENTS = {"models": "model", "data": "data", "sources": ""}  # with their `accept_changed`
# Mappings without keys of their own.
_OF_THE_USER = ("kwargs", "loss_kwargs", "arguments", "chat_template_kwargs")


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run.

    ``models``, ``data`` and ``sources`` (files of functions, classes, commands, templates): by
    configuration key, where it was, and a fingerprint of its content (None: it could not be read),
    so that a file may be moved. ``settings``: all other keys but those of `MAY_CHANGE`.
    """

    algorithm: Algorithm
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: BaseRunConfig) -> "RunIdentity":
        """Identity of the run that ``config`` describes."""
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
        """Identity kept in a run state; of earlier versions, what their configuration tells.

        Raises:
            CheckpointError: no training script wrote it.
        """
        known = state.get("identity", {})
        models, data, sources = (known.get(name, {}) for name in _CONTENTS)
        try:
            config = state["config"]
            settings = identity_settings(config)
            return cls(algorithm_of(config), models, _without_arguments(data), sources, settings)
        except (KeyError, StopIteration, AttributeError, TypeError) as error:
            raise CheckpointError(
                "the run state does not tell its algorithm: no training script wrote it; set "
                "exp_manager.explicit_log_dir to another directory"
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """Dictionary as in JSON."""
        return {**asdict(self), "algorithm": self.algorithm._asdict()}

    def refusals(
        self,
        saved: "RunIdentity",
        accepted: Sequence[str],
        changed: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Reasons why this run does not continue ``saved``; empty: it does.

        Args:
            saved: identity in the run state.
            accepted: kinds of what may be another (``exp_manager.accept_changed``).
            changed: keys, or sections, that may differ (``exp_manager.resume_changed``).
            defaults: of the configuration. A key that ``saved`` lacks is no change with its
                default: an earlier version wrote the state.
        """
        mine, others = self.algorithm, saved.algorithm
        names = f"its algorithm is {others.name} and this command's is {mine.name}"
        if mine[1:] != others[1:]:
            return [names]
        sections = [f"{part}.{mine.section}" for part in ("trainer", "model")]
        free = {"data": ["data.train"], "algorithm": sections if mine.name != others.name else []}
        may_differ = [*changed, *(key for kind in accepted for key in free.get(kind, self.models))]
        differing = {
            key: reason
            for key, reason in self._differences(saved, flat(defaults or {}))
            if not any(_is_below(key, name) for name in may_differ)
        }
        if not differing:
            return []
        reasons = list(differing.values())
        if mine.name != others.name and "algorithm" not in accepted:
            reasons = [f"{names}{_accept('algorithm')}", *reasons]
        changes = f"'exp_manager.resume_changed=[{','.join(differing)}]' accepts the changed keys"
        return [*reasons, changes]

    def _differences(
        self, saved: "RunIdentity", defaults: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Keys that differ, each with the difference in words."""
        parts = [(name, getattr(self, name), getattr(saved, name)) for name in _CONTENTS]
        for key in sorted(self.settings.keys() | saved.settings.keys()):
            now, before = self.settings.get(key), saved.settings.get(key)
            unknown = _content(before, None)
            contents = {
                name: (mine[key], old.get(key, unknown)) for name, mine, old in parts if key in mine
            }
            if not contents:
                if now != before and not self._is_of_a_version(key, saved, defaults):
                    yield key, f"{key}: {before} -> {now}"
            elif not all(_same_content(*pair) for pair in contents.values()):
                was = next(iter(contents.values()))[1]["source"]
                accept = [_accept(_CONTENTS[name]) for name in contents if _CONTENTS[name]]
                yield (
                    key,
                    f"its {key} was {was} and {key}={now} has another content{''.join(accept)}",
                )

    def _is_of_a_version(self, key: str, saved: "RunIdentity", defaults: Mapping[str, Any]) -> bool:
        """Return whether ``key`` differs because one version has it and another does not."""
        if any(name in key.split(".") for name in _OF_THE_USER):
            return False
        if key not in saved.settings:
            replaced = any(_is_below(old, key) for old in saved.settings)
            return not replaced and self.settings[key] in (defaults.get(key), [], None)
        return key not in self.settings and not any(_is_below(key, now) for now in self.settings)


def identity_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves of a configuration, by dotted key, that are part of a run's identity."""
    return {
        key: value
        for key, value in flat(config).items()
        if not any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)
    }


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by dotted key; an earlier path of a task is its present one."""
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
    return key == section or key.startswith(f"{section}.")


def _accept(kind: str) -> str:
    return f" ('exp_manager.accept_changed=[{kind}]' continues with it all the same)"


def _content(source: Any, content: str | None) -> dict[str, Any]:
    return {"source": source, "content": content}


def _same_content(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Compare contents and names of functions; of what could not be read, names of files."""
    ends = [_ends(each["source"]) for each in (now, before)]
    if None in (now["content"], before["content"]):
        return ends[0] == ends[1]
    functions = [[name.partition(":")[2] for name in names] for names in ends]
    contents = [_current(each["content"]) for each in (now, before)]
    return contents[0] == contents[1] and functions[0] == functions[1]


def _ends(source: Any) -> list[str]:
    parts = source if isinstance(source, list) else [source]
    return [str(part).rpartition("/")[2] for part in parts]


def _code_content(key: str, value: Any) -> str | None:
    """Fingerprint of the files of the user's that a setting names; None: it names none."""
    if not isinstance(value, str | list):
        return None
    is_command = key == "environment.command"
    words = value.split() if is_command and isinstance(value, str) else value
    files: list[Path] = []
    for word in [words] if isinstance(words, str) else map(str, words):
        place, separator, _ = word.rpartition(":")
        path = Path(place if separator else word).expanduser()
        if key == "environment.chat_template" or path.suffix in (".py", ".sh"):
            files.append(path)
        elif key == "model.tokenizer" and path.exists():
            files += [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*")))
        elif not is_command:
            files += _module_file(place if separator else word.rpartition(".")[0])
    return fingerprint_of(files) if files else None


def _module_file(module: str) -> list[Path]:
    """The file of a user's module, which is not imported; none of this library's own."""
    names = module.split(".")
    if names[0] == "aligner" or not all(name.isidentifier() for name in names):
        return []
    places = (Path(folder, *names).with_suffix(".py") for folder in ("", *sys.path))
    return [path for path in places if path.is_file()][:1]


def _data_content(source: Source) -> str | None:
    """Fingerprint of a source's files, or the names of its generators; None: it is unreadable."""
    contents = []
    for part in [source] if isinstance(source, (str, Path)) else source:
        try:
            files = source_files(part)
            # A generator's file may stand elsewhere.
            contents.append(Path(str(part)).name if files is None else fingerprint_of(files))
        except (DataError, OSError):  # reported when it is read
            return None
    return None if None in contents else json.dumps(contents)


def _without_arguments(data: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Contents of data; those of earlier versions had a generator's arguments, which are keys."""
    contents = {key: _content(entry["source"], entry["content"]) for key, entry in data.items()}
    for entry in contents.values():
        if str(entry["content"]).startswith("[["):
            entry["content"] = json.dumps(json.loads(entry["content"])[0])
    return contents
