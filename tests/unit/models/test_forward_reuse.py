"""Values out of the pass that trains: the critic reads a rollout of one update once.

1. Where the rollout is one micro-batch of one update, the body runs once, and the update is to the
   bit what it is from a pass of its own.
2. Whatever makes the reused pass another one than training would make, it is not used.
3. What draws or counts in training, or takes several passes, is never kept.
"""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch

from aligner.config import OptimConfig
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import MegatronGPTCriticModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings

pytestmark = pytest.mark.integration

LENGTHS = (9, 5, 12, 7)
ROWS, WIDTH = len(LENGTHS), max(LENGTHS)
WHOLE = {"micro_batch_size": ROWS, "global_batch_size": ROWS}


def make_critic(tiny_nemo, **changes):
    settings = RoleSettings(optim=OptimConfig(lr=1e-2), **{**WHOLE, **changes})
    critic = load_from_nemo(MegatronGPTCriticModel, settings, restore_path=tiny_nemo)
    with torch.no_grad():
        critic.gpt.rm_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    critic.setup_training()
    critic.loss_fn = PPOValueLoss(value_clip=None)
    return critic


def make_batch():
    generator = torch.Generator().manual_seed(7)
    lengths, position = torch.tensor(LENGTHS), torch.arange(WIDTH)
    return {
        "input_ids": torch.randint(1, 250, (ROWS, WIDTH), generator=generator),
        "input_lengths": lengths,
        "token_mask": ((position > 1) & (position < lengths[:, None])).float(),
        "sample_mask": torch.ones(ROWS),
        "returns": torch.randn(ROWS, WIDTH, generator=generator),
        "values": torch.zeros(ROWS, WIDTH),
    }


@pytest.fixture
def passes():
    """Counts forward passes of the bodies of critics that it is given."""
    counts = []

    def count(critic):
        critic.gpt.decoder.register_forward_hook(lambda *_: counts.append(critic))
        return critic

    count.made = counts
    return count


def scored(critic, batch):
    critic.prepare_for_inference()
    values = critic.get_values(batch)
    critic.finish_inference()
    return values


def updated(critic, batch):
    critic.prepare_for_training()
    metrics = critic.training_update(batch)
    critic.finish_training()
    return metrics, {name: value.clone() for name, value in critic.gpt.named_parameters()}


def assert_same_update(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


@pytest.mark.parametrize(
    "changes",
    [{}, {"recompute": "full"}, {"sequence_packing": True}, {"precision": "bf16"}],
    ids=["plain", "recompute", "packed", "bf16"],
)
def test_the_body_runs_once_and_the_update_is_the_same_to_the_bit(changes, tiny_nemo, passes):
    batch, critic = make_batch(), passes(make_critic(tiny_nemo, **changes))
    values = scored(critic, batch)
    assert not values.requires_grad
    assert not critic.model.training
    kept = updated(critic, batch)
    assert len(passes.made) == 1

    own = make_critic(tiny_nemo, **changes)
    assert torch.equal(values, own.get_values(batch))
    own.forward_reuse.drop()
    assert_same_update(kept, updated(own, batch))
    second = updated(critic, batch)  # no second time
    assert_same_update(second, updated(own, batch))


def other_rows(critic, batch):
    batch["input_ids"] = batch["input_ids"].roll(1, dims=0)


def other_lengths(critic, batch):
    batch["input_lengths"] = torch.tensor([9, 5, 12, 6])


def weights_written(critic, batch):
    with torch.no_grad():
        critic.gpt.rm_head.weight.add_(0.5)


def weights_loaded(critic, batch):
    weights = critic.whole_weights()
    critic.load_whole_weights({name: value * 1.5 for name, value in weights.items()})


def state_loaded(critic, batch):
    state = copy.deepcopy(critic.run_state())
    updated(critic, batch)
    later = copy.deepcopy(critic.run_state())
    critic.load_run_state([state])
    critic.get_values(batch)
    critic.load_run_state([later])


def inference_again(critic, batch):
    critic.prepare_for_inference()


@pytest.mark.parametrize(
    "change",
    [other_rows, other_lengths, weights_written, weights_loaded, state_loaded, inference_again],
)
def test_another_pass_is_not_used(change, tiny_nemo, passes):
    batch, critic = make_batch(), make_critic(tiny_nemo)
    scored(critic, batch)
    change(critic, batch)
    passes(critic)
    kept = updated(critic, batch)
    assert len(passes.made) == 1, "training made a pass of its own"

    own, batch = make_critic(tiny_nemo), make_batch()
    change(own, batch)
    own.forward_reuse.drop()
    assert_same_update(kept, updated(own, batch))


def test_the_graph_is_freed_with_the_update(tiny_nemo):
    batch, critic = make_batch(), make_critic(tiny_nemo)
    scored(critic, batch)
    hidden = weakref.ref(critic.forward_reuse._microbatch.hidden)
    updated(critic, batch)
    gc.collect()
    assert hidden() is None


@pytest.mark.parametrize("changes", [{"micro_batch_size": 2}, {"global_batch_size": 2}])
def test_what_takes_several_passes_is_not_kept(changes, tiny_nemo):
    critic = make_critic(tiny_nemo, **changes)
    critic.get_values(make_batch())
    assert critic.forward_reuse._microbatch is None


@pytest.mark.parametrize(
    "changes", [{"hidden_dropout": 0.1}, {"attention_dropout": 0.1}, {"num_moe_experts": 4}]
)
def test_what_draws_or_counts_in_training_is_not_kept(changes, tiny_nemo):
    critic = make_critic(tiny_nemo)
    critic.architecture = dataclasses.replace(critic.architecture, **changes)
    critic.get_values(make_batch())
    assert critic.forward_reuse._microbatch is None


@pytest.mark.parametrize("name", ["adapters", "rewards_of"])
def test_a_body_that_holds_other_weights_at_times_is_not_kept(name, tiny_nemo):
    critic = make_critic(tiny_nemo)
    setattr(critic, name, lambda batch: None)  # anything: it is there
    critic.get_values(make_batch())
    assert critic.forward_reuse._microbatch is None
