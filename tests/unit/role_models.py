"""Roles of one process, ready to train, for the tests of how rows stand in a model."""

import torch

from aligner.models.gpt import load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings


def load_role(cls, loss, path, **settings):
    """The role of a `.nemo`; a fresh head is zero and would let no gradient into the body."""
    role = load_from_nemo(cls, RoleSettings(**settings), restore_path=path)
    if hasattr(role.gpt, "rm_head"):
        with torch.no_grad():
            role.gpt.rm_head.weight.normal_(generator=torch.Generator().manual_seed(3))
    role.setup_training()
    role.loss_fn = loss
    return role


def gradients(role):
    """Copies of what is in the gradient buffers, by the names of the trained parameters."""
    return {name: p.main_grad.clone() for name, p in trained(role)}


def trained(role):
    return [(name, p) for name, p in role.gpt.named_parameters() if p.requires_grad]
