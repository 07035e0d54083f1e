"""Order of prompts: by seed and epoch, resumable, defined for any batch size."""

import pytest
import torch

from aligner.data.batches import (
    Mixture,
    Prompt,
    PromptSampler,
    collate_prompts,
    epoch_order,
    pad_right,
    sequential_batches,
)
from aligner.errors import DataError


def draw(sampler, count):
    return [sampler.next_batch() for _ in range(count)]


def test_order_depends_on_seed_and_epoch_alone():
    assert sorted(epoch_order(100, 1, 0)) == list(range(100))
    assert epoch_order(100, 1, 0).tolist() == epoch_order(100, 1, 0).tolist()
    assert epoch_order(100, 1, 0).tolist() != epoch_order(100, 1, 1).tolist()
    assert epoch_order(100, 1, 0).tolist() != epoch_order(100, 2, 0).tolist()
    # (seed, epoch) is a pair, not a sum
    assert epoch_order(100, 1, 2).tolist() != epoch_order(100, 2, 1).tolist()
    # written down once: another machine, the same order
    assert epoch_order(8, 1, 0).tolist() == [5, 0, 1, 4, 2, 6, 3, 7]


def test_epochs_follow_each_other():
    sampler = PromptSampler(5, 2, seed=1)
    flat = [index for batch in draw(sampler, 5) for index in batch]
    assert flat[:5] == epoch_order(5, 1, 0).tolist()
    assert flat[5:] == epoch_order(5, 1, 1).tolist()
    assert (sampler.epoch, sampler.position) == (1, 5)
    assert PromptSampler(5, 2, seed=1).batches_left(1) == 3
    assert PromptSampler(5, 2, seed=1).batches_left(2) == 5
    sampler = PromptSampler(3, 8, seed=4)
    orders = [epoch_order(3, 4, epoch).tolist() for epoch in range(3)]
    assert sampler.next_batch() == (orders[0] + orders[1] + orders[2])[:8]
    sampler = PromptSampler(3, 2, seed=1, shuffle=False)
    assert draw(sampler, 3) == [[0, 1], [2, 0], [1, 2]]
    assert list(sequential_batches(5, 2)) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("before", [0, 2, 3, 7])
def test_resumes_where_it_stopped(before):
    whole = draw(PromptSampler(7, 3, seed=2), before + 6)
    stopped = PromptSampler(7, 3, seed=2)
    draw(stopped, before)
    resumed = PromptSampler(7, 3, seed=2)
    resumed.load_state_dict(stopped.state_dict())
    assert draw(resumed, 6) == whole[before:]


def test_other_data_are_refused_or_begin_the_next_epoch():
    state = PromptSampler(7, 3, seed=2).state_dict()
    with pytest.raises(DataError, match="size=7, but this run has size=8"):
        PromptSampler(8, 3, seed=2).load_state_dict(state)
    with pytest.raises(DataError, match="seed=2, but this run has seed=3"):
        PromptSampler(7, 3, seed=3).load_state_dict(state)
    before = PromptSampler(7, 3, seed=2)
    draw(before, 2)
    resumed = PromptSampler(4, 3, seed=2, may_change=True)
    resumed.load_state_dict(before.state_dict())
    assert resumed.next_batch() == epoch_order(4, 2, 1)[:3].tolist()


@pytest.mark.parametrize(("size", "seed", "shuffle"), [(7, 3, True), (7, 2, False), (9, 2, True)])
def test_a_change_that_was_accepted_goes_on_in_the_new_order(size, seed, shuffle):
    before = PromptSampler(7, 3, seed=2)
    draw(before, 1)
    resumed = PromptSampler(size, 3, seed=seed, shuffle=shuffle, may_change=True)
    resumed.load_state_dict(before.state_dict())
    whole = PromptSampler(size, 3, seed=seed, shuffle=shuffle)
    assert draw(resumed, 4) == draw(whole, 5)[1:]


def test_prompts_are_padded_to_a_batch():
    ids, lengths = pad_right([[7, 0, 0], [5], []], pad_id=0)
    assert ids.tolist() == [[7, 0, 0], [5, 0, 0], [0, 0, 0]]
    assert lengths.tolist() == [3, 1, 0]  # zeros that are tokens count
    assert ids.dtype == lengths.dtype == torch.int64
    assert pad_right([[1, 2, 3]], 9)[0].shape == (1, 3)
    prompts = [
        Prompt(4, "ab", [1, 2], "x", {"level": 3}),
        Prompt(9, "c", [3], None, {"source": "web"}),
    ]
    batch = collate_prompts(prompts, pad_id=8)
    assert len(batch) == 2
    assert batch.input_ids.tolist() == [[1, 2], [3, 8]]
    assert batch.input_lengths.tolist() == [2, 1]
    assert batch.prompt_ids.tolist() == [4, 9]
    assert batch.texts == ["ab", "c"]
    assert batch.ground_truths == ["x", None]
    assert batch.columns == {"level": [3, None], "source": [None, "web"]}


def mixture(*weights):
    return Mixture("abc", [4, 10, 6], weights)


def test_weights_are_the_shares_of_an_epoch():
    sampler = PromptSampler(20, 20, seed=3, mixture=mixture(2, 1, 1))
    epochs = draw(sampler, 6)
    for epoch in epochs:
        assert len([i for i in epoch if i < 4]) == 10
        assert len([i for i in epoch if 4 <= i < 14]) == 5
    # A source continues its passes: two epochs show all ten items of the second source.
    assert {i for i in epochs[0] + epochs[1] if 4 <= i < 14} == set(range(4, 14))
    # The first source is repeated as a whole: 60 of its items are 15 passes.
    first = [i for epoch in epochs for i in epoch if i < 4]
    assert [first.count(i) for i in range(4)] == [15] * 4
    assert epochs[0] != epochs[1]


def test_sources_alternate_and_need_items():
    sampler = PromptSampler(20, 20, seed=3, shuffle=False, mixture=mixture(2, 1, 1))
    first, second = draw(sampler, 2)
    assert first == [0, 4, 14, 1, 2, 5, 15, 3, 0, 6, 16, 1, 2, 7, 17, 3, 0, 8, 18, 1]
    assert [i for i in second if i < 4] == [2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert [i for i in second if 4 <= i < 14] == [9, 10, 11, 12, 13]
    with pytest.raises(DataError, match=r"weights=\[1, 1, 0.01\]: c has 6 items and 0 of the 20"):
        mixture(1, 1, 0.01)
    with pytest.raises(DataError, match=r"b has 0 items"):
        Mixture("ab", [3, 0], [1, 1])


@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_resume_at_the_next_item(shuffle):
    options = {"seed": 3, "shuffle": shuffle, "mixture": mixture(1, 7, 2.5)}
    whole = PromptSampler(20, 3, **options)
    batches = draw(whole, 30)
    for done in (1, 6, 7, 19):
        begun = PromptSampler(20, 3, **options)
        draw(begun, done)
        resumed = PromptSampler(20, 3, **options)
        resumed.load_state_dict(begun.state_dict())
        assert draw(resumed, 30 - done) == batches[done:]
