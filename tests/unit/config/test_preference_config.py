"""What a preference run refuses, before any model is built."""

from types import SimpleNamespace

import pytest

from aligner.algorithms.preference.build import preference_loss
from aligner.config import DPORunConfig, parse_config
from aligner.distributed.named_sharding import NamedSharding
from aligner.errors import ConfigError
from aligner.losses.preference import DPOLoss, IPOLoss, KTOLoss, RPOLoss, SimPOLoss
from aligner.models.handle import check_whole_groups


def parsed(dpo=None, model=None, data=None):
    return parse_config(
        {
            "model": {"restore_from_path": "m.nemo", **(model or {})},
            "data": {"train": {"source": "pairs.jsonl"}, **(data or {})},
            "trainer": {"dpo": dpo or {}},
        },
        DPORunConfig,
    )


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({"label_smoothing": 0.1, "sft_weight": 0.5}, DPOLoss(0.1, 0.5, label_smoothing=0.1)),
        ({"loss": "ipo", "beta": 0.3, "average_logprobs": True}, IPOLoss(0.3, 0.0, True)),
        (
            {"loss": "rpo", "distance": "square", "reward_scale": 2},
            RPOLoss(distance="square", reward_scale=2.0),
        ),
        ({"loss": "simpo", "target_margin": 0.4}, SimPOLoss(beta=2.0, target_margin=0.4)),
        (
            {"loss": "kto", "desirable_weight": 2.0, "undesirable_weight": 0.5},
            KTOLoss(0.1, 2.0, 0.5),
        ),
    ],
)
def test_options_reach_the_loss(options, loss):
    assert preference_loss(parsed(options).trainer.dpo) == loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "kto", "label_smoothing": 0.1}, "label_smoothing=0.1 is an option of dpo, but"),
        ({"distance": "square"}, "distance=square is an option of rpo"),
        ({"loss": "ipo", "target_margin": 2}, "target_margin=2.0 is an option of simpo"),
        ({"loss": "simpo", "average_logprobs": True}, "is an option of dpo, ipo, rpo"),
        ({"loss": "kto", "sft_weight": 1}, "is an option of dpo, ipo, rpo, simpo"),
        ({"desirable_weight": 2}, "is an option of kto"),
        ({"label_smoothing": 0.5}, r"label_smoothing: must be .* 0 and 0.5 \(exclusive\), got 0.5"),
        ({"loss": "orpo"}, "must be one of dpo, ipo, rpo, simpo, kto"),
    ],
)
def test_options_of_another_loss_are_refused(options, message):
    with pytest.raises(ConfigError, match=rf"trainer\.dpo\..*{message}"):
        parsed(options)


def test_a_pair_takes_two_rows():
    with pytest.raises(ConfigError, match=r"model\.micro_batch_size=3 counts rows.* 2 or 4"):
        parsed(model={"micro_batch_size": 3, "global_batch_size": 6})
    with pytest.raises(ConfigError, match=r"model\.global_batch_size=9 counts rows.* 8 or 10"):
        parsed(model={"global_batch_size": 9})
    parsed({"loss": "kto"}, model={"micro_batch_size": 3, "global_batch_size": 9})


@pytest.mark.parametrize(
    ("section", "multiple", "needed"),
    [("sequence_packing", {}, 42), ("dynamic_batching", {"sequence_length_round": 8}, 48)],
)
def test_a_token_budget_holds_both_rows_of_a_pair(section, multiple, needed):
    def budget(tokens):
        return {section: {"enabled": True, "train_mb_tokens": tokens, **multiple}}

    data = {"max_length": 21}
    parsed(model=budget(needed), data=data)
    parsed({"loss": "kto"}, model=budget(24), data=data)
    with pytest.raises(ConfigError, match=f"Raise it to at least {needed}, or lower data.max_len"):
        parsed(model=budget(needed - (8 if multiple else 1)), data=data)


def test_both_rewards_or_none():
    said = r"data\.rejected_reward_column=None: .*Set both or neither"
    with pytest.raises(ConfigError, match=said):
        parsed(data={"chosen_reward_column": "good"})


@pytest.mark.parametrize(("rows", "micro_batch"), [(6, 2), (8, 3)])
def test_micro_batches_do_not_cut_pairs(rows, micro_batch):
    """Two data-parallel ranks would get 3 rows each, or begin a micro-batch within a pair."""
    group = SimpleNamespace(sharding_annotations=NamedSharding(range(2), ["data_parallel"]))
    check_whole_groups(group, rows, micro_batch, 1)
    with pytest.raises(ConfigError, match=r"2 adjacent rows\..*global_batch_size"):
        check_whole_groups(group, rows, micro_batch, 2)
