"""Forward passes of expert-parallel ranks that differ in number, as generation's do.

Every expert layer exchanges tokens with the other ranks of its group, so a rank may only run one
while all others run the same one. Ranks that generate stop at different times. Inside
`experts_in_step` each pass is announced, and a rank that has finished goes on with passes of the
expert layers only, one token of zeros each, until all have.

A pass may bring any number of tokens: a rank may take in prompts while another adds single tokens.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer

from aligner.distributed import accelerator


@contextlib.contextmanager
def experts_in_step(gpt: GPTModel) -> Iterator[None]:
    """The block in which this rank may run any number of forward passes; collective.

    All ranks of the expert-parallel group must enter it, and must not use the group for anything
    else inside. Nothing happens where no experts are shared out. An error inside does not wait for
    the other ranks.
    """
    layers = [layer.mlp for layer in gpt.decoder.layers if isinstance(layer.mlp, MoELayer)]
    if not layers or layers[0].ep_group.size() == 1:
        yield
        return
    group = layers[0].ep_group

    def announce(*_: Any) -> None:
        _anyone_works(True, group)

    hook = gpt.decoder.register_forward_pre_hook(announce)
    try:
        yield
    finally:
        hook.remove()
    parameter = next(gpt.decoder.parameters())
    idle = parameter.new_zeros(1, 1, gpt.config.hidden_size)
    with torch.no_grad():
        while _anyone_works(False, group):
            for experts in layers:
                experts(idle)


def _anyone_works(this_rank: bool, group: dist.ProcessGroup) -> bool:
    working = torch.tensor([int(this_rank)], device=accelerator.device())
    dist.all_reduce(working, dist.ReduceOp.MAX, group=group)
    return bool(working.item())
