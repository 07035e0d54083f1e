"""A row of several sequences is computed and learned as if each stood in a row of its own."""

import numpy as np
import pytest
import torch
from batches import ppo_batch
from conversations import Babble
from conversations import collected as conversations
from test_chat_data import R1, chatml
from test_credit import assign, credit
from test_token_layout import assert_same_gradient, load, loss_and_gradient
from user_environments import Echo

from aligner.algorithms.rollout.environments import EnvironmentReward
from aligner.algorithms.rollout.rollout import score
from aligner.distributed.batched_data_dict import BatchedDataDict, columns_of
from aligner.distributed.sequences import Sequences
from aligner.errors import DataError
from aligner.models.gpt.forward.token_layout import LayoutRules, build_layout
from aligner.models.gpt.lora import TokenDropout

# Rows of 3, 1 and 2 sequences.
LENGTHS = [[5, 40, 38], [12], [60, 7]]
WIDTH = 96


def row_positions():
    found = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64)
    for row, lengths in enumerate(LENGTHS):
        each = torch.cat([torch.arange(length) for length in lengths])
        found[row, : len(each)] = each
    return found


def test_sequences_of_rows_by_hand():
    totals = np.array([sum(lengths) for lengths in LENGTHS])
    columns = row_positions().numpy()
    found = Sequences.find(columns, totals)
    assert found.offsets.tolist() == [0, 5, 45, 96, 192, 252]
    assert found.lengths.tolist() == [5, 40, 38, 12, 60, 7]
    ids = np.arange(3 * WIDTH).reshape(3, WIDTH)
    assert found.cut(ids)[3, :13].tolist() == [*range(96, 108), 0]
    assert Sequences.find(columns[1:2], totals[1:2]) is None
    # As many sequences as rows, for one row has none.
    both = columns[[2, 1]]
    found_in = Sequences.find(both, np.array([totals[2], 0]))
    assert (found_in.offsets.tolist(), found_in.lengths.tolist()) == ([0, 60], [60, 7])
    assert Sequences.find(both[1:].repeat(2, 0), np.array([12, 0])) is None
    layout = build_layout(torch.from_numpy(ids), totals, LayoutRules(False, 1, 1), None, found)
    rows, tokens = layout.predicted_tokens()
    positions = [at for lengths in LENGTHS for length in lengths for at in range(length - 1)]
    assert layout.positions[0, rows].tolist() == positions
    assert not {0, 5, 45, 96, 192, 252} & set(tokens.tolist())  # nothing predicts a first token


def batches():
    """Rows of several sequences, and the same with a row for each sequence."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 250, (len(LENGTHS), WIDTH), generator=generator)
    ids[0, 45:80] = ids[0, 5:40]  # shared by three sequences, two of them of one row
    ids[2, :36] = ids[0, 5:41]
    where = row_positions()
    inside = torch.arange(WIDTH) < torch.tensor([[sum(each)] for each in LENGTHS])
    lengths = [sum(each) for each in LENGTHS]
    joined = ppo_batch(lengths, [0] * len(LENGTHS), width=WIDTH)
    joined |= {
        "input_ids": ids,
        "position_ids": where,
        "token_mask": ((where > 1) & inside).float(),
    }
    bounds = [
        (row, sum(lengths[:number]), length)
        for row, lengths in enumerate(LENGTHS)
        for number, length in enumerate(lengths)
    ]
    apart = {"input_lengths": torch.tensor([length for *_, length in bounds])}
    apart["sample_mask"] = torch.ones(len(bounds))
    for name, column in joined.items():
        if column.dim() == 2 and name != "position_ids":
            apart[name] = torch.zeros(len(bounds), WIDTH, dtype=column.dtype)
            for index, (row, start, length) in enumerate(bounds):
                apart[name][index, :length] = column[row, start : start + length]
    return joined, apart, bounds


@pytest.mark.integration
@pytest.mark.parametrize(
    "settings",
    [{}, {"sequence_packing": True}, {"shared_prefixes": False}],
    ids=["padded", "packed", "unshared"],
)
@pytest.mark.parametrize("name", ["actor", "critic"])
def test_a_forked_row_is_worth_its_sequences(name, settings, tiny_nemo):
    role = load(name, tiny_nemo, **settings)
    joined, apart, bounds = batches()
    expected = role.infer_tokens(apart, len(bounds))
    for mbs in (1, 3):
        found = role.infer_tokens(joined, mbs)
        for index, (row, start, length) in enumerate(bounds):
            one = found[row, start : start + length]
            assert torch.allclose(one, expected[index, :length], atol=1e-5)
        expected_gradient = loss_and_gradient(role, apart, 6)
        assert_same_gradient(loss_and_gradient(role, joined, mbs), expected_gradient)
    other = {**joined, "position_ids": torch.arange(WIDTH).expand(len(LENGTHS), -1)}
    assert (role.infer_tokens(other, 3) - role.infer_tokens(joined, 3)).abs().max() > 1e-3


def test_positions_go_where_token_ids_go_and_adapters_drop_out_by_them():
    joined, apart, bounds = batches()
    dropout = TokenDropout(0.5, seed=3)

    def dropped(batch, positions=None):
        ids = batch["input_ids"]
        held = torch.arange(ids.numel())[None]
        with dropout.of_pass(ids, batch["input_lengths"], held, positions):
            hidden = dropout(torch.ones(ids.numel(), 1, 8), 0, part=0, parts=1, first=0)
        return hidden.view(*ids.shape, 8)

    one, other = dropped(joined, joined["position_ids"]), dropped(apart)
    for index, (row, start, length) in enumerate(bounds):
        assert torch.equal(one[row, start : start + length], other[index, :length])
    assert not torch.equal(one[0, 5:45], dropped(joined)[0, 5:45])
    batch = BatchedDataDict(joined)
    assert "position_ids" in columns_of(batch, ("input_ids", "input_lengths"))
    assert "position_ids" not in columns_of(batch, ("input_lengths", "advantages"))


TOKENIZER = chatml(R1)  # drops thinking of earlier turns


class Thinks(Babble):
    """An engine that thinks before every answer."""

    def _row(self, ids, key, most):
        thought = [*TOKENIZER.encode("hm</think>"), ord("0") + len(self.calls), 258]
        return ids + thought, [0.0] * len(ids) + [-0.5] * len(thought), True


class Keeps(Thinks):
    """Records with every token itself."""

    def generate(self, *args, **kwargs):
        found = super().generate(*args, **kwargs)
        found["kept_ids"] = found["output_ids"][..., None].int()
        return found


def collected(engine=None, **settings):
    options = {"engine": engine or Thinks(), "tokenizer": TOKENIZER, "longest": 16}
    return conversations(Echo, [{"turns": 3}, {"turns": 1}], **options, **settings)


def test_forks_are_refused_kept_or_counted():
    with pytest.raises(DataError, match=r"rewrites earlier turns.*rewritten_history=fork"):
        collected(rewritten_history="refuse")
    kept = collected(rewritten_history="keep")
    assert kept["forks"] == [0, 0]
    assert "position_ids" not in kept
    assert TOKENIZER.decode(kept["input_ids"][0].tolist()).count("hm</think>") == 3
    whole = collected()["input_lengths"][0]
    cut = collected(max_tokens=int(whole) - 1)
    assert cut["end_reasons"] == ["max_tokens", "done"]
    assert cut["input_lengths"][0] < whole
    assert cut["forks"] == [1, 0]  # what nobody answered is no sequence
    # What a filter kept stands where its token was sampled.
    batch = collected(Keeps())
    assert batch["forks"] == [2, 0]
    sampled = batch["token_mask"] > 0  # a sequence that repeats it has none
    expected = torch.where(sampled, batch["input_ids"], -1).int()
    assert torch.equal(batch["kept_ids"], expected[..., None])


@pytest.mark.parametrize("timestep", ["token", "turn"])
def test_credit_is_that_of_one_trajectory(timestep):
    """Advantages and returns of what was sampled are those of the conversation that was kept."""
    found = []
    for how in ("fork", "keep"):
        batch = collected(rewritten_history=how)
        score(EnvironmentReward(), batch)
        sampled = batch["token_mask"] > 0
        values = torch.zeros(sampled.shape)
        values[sampled] = torch.linspace(-1, 1, int(sampled.sum()))
        batch["values"] = values + 9.0 * ~sampled  # of other tokens nobody reads values
        assign(credit(discount_factor=0.9, gae_lambda=0.8, timestep=timestep), batch)
        found.append((batch["advantages"][sampled], batch["returns"][sampled]))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
