"""Roles of one process: heads that are not zero, updates, and checks that every role passes."""

import copy
from functools import partial

import torch

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt import load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings

# To the bit: tensors and numbers in lists or mappings.
assert_equal = partial(torch.testing.assert_close, rtol=0.0, atol=0.0)


@torch.no_grad()
def fill_head(role, seed=3, std=1.0):
    """Give the head random numbers: a fresh one is zero and would let no gradient into the body."""
    for parameter in role.gpt.rm_head.parameters():
        parameter.normal_(0.0, std, generator=torch.Generator().manual_seed(seed))


def write_tokenizer(folder):
    """Write the byte-level tokenizer into a directory, and return it."""
    tokenizer = byte_level_tokenizer()
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
    return tokenizer


def load_role(cls, loss, path, **settings):
    """The role of a `.nemo`, ready to train."""
    role = load_from_nemo(cls, RoleSettings(**settings), restore_path=path)
    if hasattr(role.gpt, "rm_head"):
        fill_head(role)
        torch.nn.init.zeros_(role.gpt.rm_head.bias)  # a pair of rewards does not depend on it
    role.setup_training()
    role.loss_fn = loss
    return role


def updated(role, loss, batch, updates=1):
    """Reports of so many updates, each with the whole batch."""
    role.loss_fn = loss
    role.prepare_for_training()
    return [role.training_update(batch, number) for number in range(updates)]


def gradients(role):
    """Copies of what is in the gradient buffers, by the names of the trained parameters."""
    return {name: p.main_grad.clone() for name, p in trained(role)}


def trained(role):
    return [(name, p) for name, p in role.gpt.named_parameters() if p.requires_grad]


def check_reference(role, batch, mode="keep"):
    """After an update, the reference has the log-probs of before, which are returned."""
    role.keep_reference(mode)
    initial = role.get_logprobs(batch)
    updated(role, PPOPolicyLoss(), batch)
    role.prepare_for_inference()
    after = role.get_logprobs(batch)
    assert (after - initial).abs().max() > 1e-3
    assert torch.equal(role.get_reference_logprobs(batch), initial)
    assert torch.equal(role.get_logprobs(batch), after)
    return initial


def check_resumed(role, resumed, batch):
    """Another role continues from a run state to the bit. Returns the state."""
    updated(role, PPOPolicyLoss(), batch)
    state = copy.deepcopy(role.run_state())
    resumed.setup_training()
    resumed.load_run_state([state])
    for each in (role, resumed):
        updated(each, PPOPolicyLoss(), batch)
    expected, found = (each.run_state()["slices"] for each in (role, resumed))
    assert expected.keys() == found.keys()
    for name, piece in expected.items():
        assert_equal(found[name]["tensors"], piece["tensors"])
    assert_equal(role.whole_weights(), resumed.whole_weights())
    return state


def check_recomputed(load, loss, batch, recompute, rtol=1e-5):
    """An update with recomputed activations gives the same weights."""
    weights = []
    for setting in (None, recompute):
        role = load(recompute=setting)
        updated(role, loss, batch)
        weights.append({shard.name: shard.local for shard in role.trained_shards})
    torch.testing.assert_close(*weights, rtol=rtol, atol=1e-6)
