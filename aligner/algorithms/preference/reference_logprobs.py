"""Log-probs of given responses under the reference policy, computed once and stored in a file.

The reference is the policy before its first update, so no second model is needed: the policy scores
the responses while it has its initial weights (before a run state is restored). The file contains
float32 log-probs of the learned tokens only, concatenated.
"""

import hashlib
import os
import pickle
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from torch import Tensor

from aligner.algorithms.supervised.trainer import ExampleSet
from aligner.checkpoint.durable import atomic_file
from aligner.config import DPORunConfig
from aligner.data.preferences import Labelled, Pair
from aligner.data.supervised import Example, collate_examples
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.collectives import on_rank_zero

Item = TypeVar("Item", Pair, Labelled)


class WithReference(Generic[Item]):
    """A data set whose examples contain their log-probs under the reference."""

    def __init__(self, items: ExampleSet[Item], logprobs: Tensor) -> None:
        """Store ``logprobs``, float32 [N], of the N learned tokens of all examples in order."""
        counts = [example.learned_tokens for example in _examples(items)]
        bounds = pairwise(accumulate(counts, initial=0))
        self._items: ExampleSet[Item] = items
        self._logprobs, self._bounds = logprobs, list(bounds)
        assert logprobs.shape == (sum(counts),), (logprobs.shape, sum(counts))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        item = self._items[index]
        examples = item.examples
        first = index * len(examples)
        bounds = self._bounds[first : first + len(examples)]
        return item.with_examples(
            [
                replace(example, ref_logprobs=self._logprobs[start:end])
                for example, (start, end) in zip(examples, bounds, strict=True)
            ]
        )


@dataclass(frozen=True)
class ReferenceLogprobs:
    """Log-probs under ``policy`` with its initial weights, or from the file ``path``."""

    policy: Policy
    path: Path
    pad_id: int
    console: Console

    def of(
        self, sets: Mapping[str, ExampleSet[Item]], config: DPORunConfig
    ) -> dict[str, WithReference[Item]]:
        """Return ``sets`` with log-probs. A file with log-probs of other inputs is replaced."""
        fingerprint = fingerprint_of(config, sets)
        reasons = on_rank_zero(lambda: _mismatches(self.path, fingerprint))
        # No reasons: the file fits. None: there is no file.
        if reasons == []:
            logprobs = torch.load(self.path, weights_only=True, mmap=True)["logprobs"]
            return {name: WithReference(items, logprobs[name]) for name, items in sets.items()}
        if reasons:
            self._say(f"{self.path} cannot be used: {', '.join(reasons)}")
        count = sum(len(items[0].examples) * len(items) for items in sets.values())
        self._say(f"computing reference log-probs of {count:,} sequences, once")
        logprobs = {
            name: self._compute(_examples(items), config.model.global_batch_size)
            for name, items in sets.items()
        }
        on_rank_zero(lambda: _write(self.path, {"fingerprint": fingerprint, "logprobs": logprobs}))
        return {name: WithReference(items, logprobs[name]) for name, items in sets.items()}

    def _compute(self, examples: Sequence[Example], rows: int) -> Tensor:
        """Return float32 log-probs of the learned tokens, from batches of ``rows`` examples."""
        self.policy.prepare_for_lp_inference()
        parts = []
        for start in range(0, len(examples), rows):
            batch = collate_examples(examples[start : start + rows], self.pad_id)
            logprobs = self.policy.get_logprobs(batch)["logprobs"].cpu()
            parts.append(logprobs[batch["token_mask"].bool()])
        return torch.cat(parts)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)


def fingerprint_of(config: DPORunConfig, sets: Mapping[str, ExampleSet[Any]]) -> dict[str, str]:
    """Return fingerprints of everything that the log-probs depend on, by a name for messages.

    The model's fingerprint covers its path, file sizes and modification times. The examples'
    fingerprint covers their tokens, and thus the tokenizer, the template and the length limit.
    """
    adapters = config.model.peft.restore_from_path
    return {
        "model": _digest(_files(config.model.restore_from_path)),
        **({} if adapters is None else {"adapters": _digest(_files(adapters))}),
        "precision": f"{config.trainer.precision}, fp8 {config.model.fp8}",
        **{f"{name} examples": _digest(_tokens(items)) for name, items in sets.items()},
    }


def _files(source: str) -> list[bytes]:
    path = Path(source).expanduser().absolute()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(str(file), os.stat(file)) for file in files if file.is_file()]
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}\n".encode() for name, stat in stats]


def _tokens(items: ExampleSet[Any]) -> list[bytes]:
    numbers = (
        [len(example.ids), *example.ids, *(bound for span in example.learned for bound in span)]
        for example in _examples(items)
    )
    return [array("q", values).tobytes() for values in numbers]


def _digest(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _examples(items: ExampleSet[Any]) -> list[Example]:
    return [example for index in range(len(items)) for example in items[index].examples]


def _mismatches(path: Path, fingerprint: Mapping[str, str]) -> list[str] | None:
    """Return why the stored log-probs cannot be used, or None without a file."""
    if not path.is_file():
        return None
    try:
        stored = torch.load(path, weights_only=True, mmap=True)["fingerprint"]
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError):
        return ["it is damaged"]
    names = sorted(stored.keys() | fingerprint.keys())
    return [f"{name} changed" for name in names if stored.get(name) != fingerprint.get(name)]


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_file(path) as file:
        torch.save(dict(value), file)
