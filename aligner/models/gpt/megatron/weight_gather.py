"""Gathering of the weights that the distributed optimizer shares out.

By default right after an update. Deferred, each is gathered in the next forward pass, just before
the module that reads it, by megatron-core's forward pre-hooks.
"""

from megatron.core.distributed import DistributedDataParallel

from aligner.distributed import accelerator


def defer_weight_gather(model: DistributedDataParallel) -> None:
    """Leave the gather to forward passes; nothing to do where every rank updates all weights."""
    if model.ddp_config.use_distributed_optimizer and not model.use_forward_hook:
        model.ddp_config.overlap_param_gather = True
        model.use_forward_hook = True
        model.enable_forward_pre_hook()


def gather_weights_after_updates(model: DistributedDataParallel, param_sync: bool = True) -> None:
    """Undo `defer_weight_gather`. Without ``param_sync`` what is not gathered yet stays so."""
    if not model.use_forward_hook:
        return
    with accelerator.cuda_literals():
        model.disable_forward_pre_hook(param_sync)
    model.use_forward_hook = False
    model.ddp_config.overlap_param_gather = False
