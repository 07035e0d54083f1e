"""Assembling preference optimisation: the data its loss reads, the loss, the reference."""

from collections.abc import Callable, Sequence
from typing import Any

from aligner.algorithms.preference.reference_logprobs import ReferenceLogprobs
from aligner.algorithms.run.assembly import Attempt, dropped_note, log_dir
from aligner.algorithms.run.dry_run import may_be_dry
from aligner.algorithms.run.longest import longest_set
from aligner.algorithms.supervised.build import Lesson, run_lesson, start_policy
from aligner.algorithms.supervised.trainer import Task
from aligner.architecture import GPTArchitecture
from aligner.batches.batched_data_dict import BatchedDataDict
from aligner.config import (
    LOSS_OPTIONS,
    DPORunConfig,
    PairDataConfig,
    PreferenceDataConfig,
    PromptSourceConfig,
    RewardDataConfig,
    TrainerDPOConfig,
)
from aligner.config.rules.checks import check_longest_example
from aligner.data.labelled import FOREIGN, LabelledDataset, collate_labelled
from aligner.data.preferences import PairDataset, PairFormat, collate_pairs
from aligner.data.supervised import ExampleFormat
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.losses.kto import KTOLoss, kto_kl_baseline
from aligner.losses.preference import DPOLoss, IPOLoss, RPOLoss, SimPOLoss
from aligner.models.policy.lm_policy import Policy
from aligner.types import LossFunction

_LOSSES: dict[str, Callable[..., LossFunction]] = {
    "dpo": DPOLoss,
    "ipo": IPOLoss,
    "rpo": RPOLoss,
    "simpo": SimPOLoss,
    "kto": KTOLoss,
}


@may_be_dry
def train_dpo(config: DPORunConfig) -> None:
    """Optimise for preferences from start to end and print where everything is."""
    loop = config.trainer.dpo

    def lesson(tokenizer: Tokenizer, architecture: GPTArchitecture) -> Lesson:
        load = load_pairs if loop.is_paired else load_labelled
        train = load(config.data, config.data.train, tokenizer)
        sets = {"training": train}
        if config.data.validation is not None:
            sets["validation"] = load(config.data, config.data.validation, tokenizer)
        longest = max(each.max_length for each in sets.values())
        if config.dry_run:
            sets = {"training": longest_set(config, train, tokenizer, architecture)}
            longest = max(longest, sets["training"].max_length)
        check_longest_example(config, longest)
        task = preference_task(config, sets, tokenizer.pad_id)

        def with_reference(attempt: Attempt, policy: Policy) -> Task[Any]:
            path = log_dir(config) / "reference_logprobs.pt"
            asking = ReferenceLogprobs(policy, path, tokenizer.pad_id, attempt.console)
            return preference_task(config, asking.of(sets, config), tokenizer.pad_id)

        return Lesson(
            task,
            # The reference is asked before the first update.
            lambda attempt, updates: start_policy(config, loop, tokenizer, attempt, updates),
            "policy",
            longest,
            dropped_note(train.dropped_too_long, "training examples", "data.max_length"),
            ask_first=with_reference if loop.has_reference else None,
        )

    run_lesson(config, loop, loop.limit_val_examples, config.data.shuffle, lesson)


def preference_loss(loop: TrainerDPOConfig) -> LossFunction:
    """The configured loss with its options."""
    options = {key: getattr(loop, key) for key in LOSS_OPTIONS[loop.loss]}
    if loop.beta is not None:
        options["beta"] = loop.beta
    return _LOSSES[loop.loss](**options)


def preference_task(config: DPORunConfig, sets: dict[str, Any], pad_id: int) -> Task[Any]:
    """Task of learning from the sets ``training`` and, where there is one, ``validation``."""
    loop = config.trainer.dpo
    collate: Callable[[Sequence[Any], int], BatchedDataDict] = (
        collate_pairs if loop.is_paired else collate_labelled
    )
    return Task(
        sets["training"],
        sets.get("validation"),
        lambda items: collate(items, pad_id),
        preference_loss(loop),
        rows_per_example=config.rows_per_example,
        complete=None if loop.is_paired else add_kl_baseline,
    )


def load_pairs(
    data: PairDataConfig,
    source: PromptSourceConfig,
    tokenizer: Tokenizer,
    *,
    rewards_in_order: bool = False,
) -> PairDataset:
    """Read and tokenize one set of pairs; ``rewards_in_order``: see `PairFormat`."""
    return PairDataset.load(
        source.source,
        tokenizer,
        PairFormat(
            prompt_column=data.prompt_column,
            chosen_column=data.chosen_column,
            rejected_column=data.rejected_column,
            chosen_reward_column=data.chosen_reward_column,
            rejected_reward_column=data.rejected_reward_column,
            rewards_in_order=rewards_in_order,
            tools_column=data.tools_column,
            chat=data.chat,
            system_prompt=data.system_prompt,
            add_bos=data.add_bos,
            max_length=data.max_length,
        ),
        arguments=source.arguments,
        limit=source.limit,
    )


def load_labelled(
    data: PreferenceDataConfig, source: PromptSourceConfig, tokenizer: Tokenizer
) -> LabelledDataset:
    """Read and tokenize one set of labelled responses."""
    return LabelledDataset.load(
        source.source,
        tokenizer,
        single_format(data),
        data.label_column,
        arguments=source.arguments,
        limit=source.limit,
    )


def single_format(data: PreferenceDataConfig | RewardDataConfig) -> ExampleFormat:
    """Format by which a row that holds one response becomes an example."""
    return ExampleFormat(
        prompt_column=data.prompt_column,
        response_column=data.response_column,
        tools_column=data.tools_column,
        chat=data.chat,
        system_prompt=data.system_prompt,
        add_bos=data.add_bos,
        max_length=data.max_length,
    )


def add_kl_baseline(policy: Policy, batch: BatchedDataDict, consumed: int | None) -> None:
    """Put ``kl_baseline`` float32 [B] in the place of a batch's foreign responses; for KTO."""
    del consumed  # the same for every batch
    names = [name for name in batch if name.startswith(FOREIGN)]
    foreign: BatchedDataDict = BatchedDataDict(
        {name.removeprefix(FOREIGN): batch.pop(name) for name in names}
    )
    policy.prepare_for_lp_inference()
    baseline = kto_kl_baseline(
        policy.get_logprobs(foreign)["logprobs"].cpu(),
        foreign["ref_logprobs"],
        foreign["token_mask"],
        foreign["sample_mask"],
    )
    batch["kl_baseline"] = baseline.expand(batch.size)
