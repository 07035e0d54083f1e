"""Preference optimisation from pairs of responses or labelled responses.

The reference policy is the policy before its first update. The policy therefore computes the
reference's log-probs before a run state is restored, and stores them in ``reference_logprobs.pt``.
"""

import hashlib
import os
import pickle
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from torch import Tensor

from aligner.algorithms.run.directory import log_dir
from aligner.algorithms.run.engine import Workers
from aligner.algorithms.run.run import Run
from aligner.algorithms.supervised.build import load_split, train_supervised
from aligner.algorithms.supervised.trainer import ExampleSet, Task
from aligner.checkpoint.durable import atomic_file
from aligner.config import LOSS_OPTIONS, DPORunConfig, TrainerDPOConfig
from aligner.data import preferences
from aligner.data.dataset import Dataset
from aligner.data.supervised import Example, collate_examples
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.losses.preference import DPOLoss, IPOLoss, KTOLoss, RPOLoss, SimPOLoss, kto_kl_baseline
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.collectives import on_rank_zero
from aligner.types import LossFunction

Item = TypeVar("Item", preferences.Pair, preferences.Labelled)
_LOSSES: dict[str, Callable[..., LossFunction]] = {
    "dpo": DPOLoss,
    "ipo": IPOLoss,
    "rpo": RPOLoss,
    "simpo": SimPOLoss,
    "kto": KTOLoss,
}


def train_dpo(config: DPORunConfig) -> None:
    """Train a policy on preferences, and print the paths of the run's files."""
    with Run.open(config) as run:
        config, loop, pad_id = run.config, run.config.trainer.dpo, run.tokenizer.pad_id
        kind: type[Dataset[Any]] = preferences.LabelledDataset
        if loop.is_paired:
            kind = preferences.PairDataset
        examples, longest = load_split(run, kind)

        def start(workers: Workers, steps: int) -> tuple[Policy, Task[Any]]:
            policy = workers.start_policy(steps)
            sets: Mapping[str, ExampleSet[Any]] = examples.named
            if loop.has_reference:  # before the first update
                path = log_dir(config) / "reference_logprobs.pt"
                reference = ReferenceLogprobs(policy, path, pad_id, run.console)
                sets = reference.of(sets, config)
            return policy, preference_task(config, sets, pad_id)

        train_supervised(run, examples, longest, start)


def preference_loss(loop: TrainerDPOConfig) -> LossFunction:
    """Return the loss that ``loop.loss`` names, with its configured options."""
    options = {key: getattr(loop, key) for key in LOSS_OPTIONS[loop.loss]}
    if loop.beta is not None:
        options["beta"] = loop.beta
    return _LOSSES[loop.loss](**options)


def preference_task(
    config: DPORunConfig, sets: Mapping[str, ExampleSet[Any]], pad_id: int
) -> Task[Any]:
    """Return the training task. ``sets`` has the keys ``training`` and possibly ``validation``."""
    train, validation = sets["training"], sets.get("validation")
    loop, loss = config.trainer.dpo, preference_loss(config.trainer.dpo)
    if loop.is_paired:
        return Task(train, validation, partial(preferences.collate_pairs, pad_id=pad_id), loss)
    collate = partial(preferences.collate_labelled, pad_id=pad_id)
    return Task(train, validation, collate, loss, add_kl_baseline)


def add_kl_baseline(policy: Policy, batch: BatchedDataDict, consumed: int | None) -> None:
    """Replace mismatched responses (to other prompts) by KTO's ``kl_baseline``, float32 [B]."""
    del consumed  # training and validation are the same
    names = [name for name in batch if name.startswith(preferences.MISMATCHED)]
    mismatched: BatchedDataDict = BatchedDataDict(
        {name.removeprefix(preferences.MISMATCHED): batch.pop(name) for name in names}
    )
    policy.prepare_for_lp_inference()
    baseline = kto_kl_baseline(
        policy.get_logprobs(mismatched)["logprobs"].cpu(),
        mismatched["ref_logprobs"],
        mismatched["token_mask"],
        mismatched["sample_mask"],
    )
    batch["kl_baseline"] = baseline.expand(batch.size)


class WithReference(Generic[Item]):
    """Data set of examples with log-probs of the reference policy."""

    def __init__(self, items: ExampleSet[Item], logprobs: Tensor) -> None:
        """Store ``logprobs``, float32 [N], of the N learned tokens of all examples."""
        counts = [example.learned_tokens for example in _examples(items)]
        self._items: ExampleSet[Item] = items
        self._logprobs, self._bounds = logprobs, list(pairwise(accumulate(counts, initial=0)))
        assert logprobs.shape == (sum(counts),), (logprobs.shape, sum(counts))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        item = self._items[index]
        first = index * len(item.examples)
        bounds = self._bounds[first : first + len(item.examples)]
        examples = [
            replace(example, ref_logprobs=self._logprobs[start:end])
            for example, (start, end) in zip(item.examples, bounds, strict=True)
        ]
        return item.with_examples(examples)


@dataclass(frozen=True)
class ReferenceLogprobs:
    """Log-probs of the reference policy, computed by ``policy`` or read from the file ``path``."""

    policy: Policy
    path: Path
    pad_id: int
    console: Console

    def of(
        self, sets: Mapping[str, ExampleSet[Item]], config: DPORunConfig
    ) -> dict[str, WithReference[Item]]:
        """Return ``sets`` with reference log-probs, read from ``path`` or computed."""
        # Read the file, unless it is missing (None) or there are reasons against it.
        fingerprint = fingerprint_of(config, sets)
        reasons = on_rank_zero(lambda: _mismatches(self.path, fingerprint))
        if reasons == []:
            logprobs = torch.load(self.path, weights_only=True, mmap=True)["logprobs"]
            return {name: WithReference(items, logprobs[name]) for name, items in sets.items()}
        # Compute the log-probs, and write the file.
        if reasons:
            self._say(f"{self.path} cannot be used: {', '.join(reasons)}")
        count = sum(len(items[0].examples) * len(items) for items in sets.values())
        self._say(f"computing reference log-probs of {count:,} sequences, once")
        rows = config.model.global_batch_size
        logprobs = {name: self._compute(_examples(items), rows) for name, items in sets.items()}

        def write() -> None:
            with atomic_file(self.path) as file:
                torch.save({"fingerprint": fingerprint, "logprobs": logprobs}, file)

        on_rank_zero(write)
        return {name: WithReference(items, logprobs[name]) for name, items in sets.items()}

    def _compute(self, examples: Sequence[Example], rows: int) -> Tensor:
        """Return the log-probs of all learned tokens, float32 [N], computed ``rows`` at a time."""
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
    """Return a fingerprint of each input of the log-probs, by name."""
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
    return [
        array("q", [len(example.ids), *example.ids, *chain(*example.learned)]).tobytes()
        for example in _examples(items)
    ]


def _digest(parts: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _examples(items: ExampleSet[Any]) -> list[Example]:
    return [example for index in range(len(items)) for example in items[index].examples]


def _mismatches(path: Path, fingerprint: Mapping[str, str]) -> list[str] | None:
    """Return reasons why the stored log-probs cannot be used, or None if there is no file."""
    if not path.is_file():
        return None
    try:
        stored = torch.load(path, weights_only=True, mmap=True)["fingerprint"]
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError):
        return ["the file is damaged"]
    names = sorted(stored.keys() | fingerprint.keys())
    return [f"{name} changed" for name in names if stored.get(name) != fingerprint.get(name)]
