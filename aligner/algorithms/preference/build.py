"""Preference optimisation: pairs or labelled responses, loss, and log-probs of the reference."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aligner.algorithms.preference.reference_logprobs import ReferenceLogprobs
from aligner.algorithms.run.directory import log_dir
from aligner.algorithms.run.run import Run
from aligner.algorithms.supervised.build import (
    check_sequences,
    example_sampler,
    load_split,
    supervised_summary,
)
from aligner.algorithms.supervised.trainer import ExampleSet, SupervisedTrainer, Task
from aligner.config import LOSS_OPTIONS, DPORunConfig, TrainerDPOConfig
from aligner.data.dataset import Dataset
from aligner.data.preferences import (
    MISMATCHED,
    LabelledDataset,
    PairDataset,
    collate_labelled,
    collate_pairs,
)
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.losses.preference import DPOLoss, IPOLoss, KTOLoss, RPOLoss, SimPOLoss, kto_kl_baseline
from aligner.models.policy.lm_policy import Policy
from aligner.types import LossFunction

_LOSSES: dict[str, Callable[..., LossFunction]] = {
    "dpo": DPOLoss,
    "ipo": IPOLoss,
    "rpo": RPOLoss,
    "simpo": SimPOLoss,
    "kto": KTOLoss,
}


def train_dpo(config: DPORunConfig) -> None:
    """Run preference optimisation from start to end and print the paths of its files."""
    with Run.open(config) as run:
        config, loop, pad_id = run.config, run.config.trainer.dpo, run.tokenizer.pad_id
        kind: type[Dataset[Any]] = PairDataset if loop.is_paired else LabelledDataset
        examples, longest = load_split(run, kind)
        check_sequences(run, longest)
        sets = examples.named
        task = preference_task(config, sets, pad_id)
        for attempt in run.attempts():
            with attempt:
                sampler, steps = example_sampler(config, examples.train)
                policy = attempt.start_policy(steps)
                if loop.has_reference:  # before the first update
                    path = log_dir(config) / "reference_logprobs.pt"
                    reference = ReferenceLogprobs(policy, path, pad_id, run.console)
                    task = preference_task(config, reference.of(sets, config), pad_id)
                limit = loop.limit_val_examples
                trainer = SupervisedTrainer(policy, task, sampler, limit_val_examples=limit)
                summary = supervised_summary(config, attempt, examples, steps, longest)
                with attempt.loop(trainer, steps, summary) as run_loop:
                    run_loop.run()


def preference_loss(loop: TrainerDPOConfig) -> LossFunction:
    """Return the configured loss with its options."""
    options = {key: getattr(loop, key) for key in LOSS_OPTIONS[loop.loss]}
    if loop.beta is not None:
        options["beta"] = loop.beta
    return _LOSSES[loop.loss](**options)


def preference_task(
    config: DPORunConfig, sets: Mapping[str, ExampleSet[Any]], pad_id: int
) -> Task[Any]:
    """Return the task for the sets ``training`` and, if present, ``validation``."""
    loop = config.trainer.dpo
    collate: Callable[..., BatchedDataDict] = collate_pairs if loop.is_paired else collate_labelled
    return Task(
        sets["training"],
        sets.get("validation"),
        partial(collate, pad_id=pad_id),
        preference_loss(loop),
        complete=None if loop.is_paired else add_kl_baseline,
    )


def add_kl_baseline(policy: Policy, batch: BatchedDataDict, consumed: int | None) -> None:
    """Replace a batch's mismatched responses by ``kl_baseline`` float32 [B], for KTO."""
    del consumed  # the same for every batch
    names = [name for name in batch if name.startswith(MISMATCHED)]
    # Pairs of a prompt with the response to another prompt estimate the KL.
    mismatched: BatchedDataDict = BatchedDataDict(
        {name.removeprefix(MISMATCHED): batch.pop(name) for name in names}
    )
    policy.prepare_for_lp_inference()
    baseline = kto_kl_baseline(
        policy.get_logprobs(mismatched)["logprobs"].cpu(),
        mismatched["ref_logprobs"],
        mismatched["token_mask"],
        mismatched["sample_mask"],
    )
    batch["kl_baseline"] = baseline.expand(batch.size)
