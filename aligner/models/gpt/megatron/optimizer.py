"""megatron-core's optimizer, with a learning-rate schedule, finite checks and state offload."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from aligner.checkpoint.run_state.tree import storage_id
from aligner.device import accelerator
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.gpt.role.training_state import (
    ModelOffload,
    OwnedSlice,
    StepOptimizer,
    StepOutcome,
)


def wrap_for_training(
    gpt: GPTModel, data_parallel_size: int, settings: RoleSettings
) -> DistributedDataParallel:
    """Wrap a model in megatron-core's data parallelism, with a float32 gradient buffer.

    Gradients are summed, because losses are divided by global counts. With overlap, they are summed
    in buckets of layers during the backward pass, and updated weights are gathered during the next
    forward pass. Until then, or until `RoleOptimizer.collect_weights`, weights are stale.
    """
    is_distributed = data_parallel_size > 1
    wrapped = DistributedDataParallel(
        gpt.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=is_distributed and settings.overlap_grad_reduce,
            overlap_param_gather=is_distributed and settings.overlap_param_gather,
            use_distributed_optimizer=is_distributed,
        ),
        gpt,
    )
    gpt.config.no_sync_func = wrapped.no_sync
    gpt.config.finalize_model_grads_func = _finalize_gradients
    return wrapped


def _finalize_gradients(model: list[nn.Module], num_tokens: Tensor | None, **groups: Any) -> None:
    """Sum partial gradients over ranks, without division by the schedule's token count."""
    del num_tokens
    with accelerator.cuda_literals():
        finalize_model_grads(model, None, **groups)


class RoleOptimizer(StepOptimizer):
    """Optimizer of one role on megatron-core."""

    def __init__(self, model: DistributedDataParallel, settings: RoleSettings) -> None:
        super().__init__(settings)
        self.model, config = model, self.config
        self._parked = ModelOffload(model)  # memory freed by `park_gradients`
        self._collected = True  # all weights that other ranks updated have been gathered
        with accelerator.cuda_literals():
            self.inner = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer=config.name,
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.betas[0],
                    adam_beta2=config.betas[1],
                    adam_eps=config.eps,
                    sgd_momentum=0.0,
                    bf16=model.config.bf16,
                    params_dtype=model.config.params_dtype,
                    clip_grad=self.gradient_clip_val,
                    use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
                ),
                [model],
                use_gloo_process_groups=False,
            )
        for group in self.inner.param_groups:
            # megatron-core's scheduler would set this, but our learning rate does not use it.
            group["weight_decay"] = config.weight_decay * group.get("wd_mult", 1.0)
            if "foreach" in group:
                # Unfused, torch's AdamW runs operation by operation on a CPU, and on a GPU needs 4
                # more bytes per parameter during a step.
                group.update(foreach=False, fused=True)

    def zero_grad(self) -> None:
        """Clear the gradient buffers."""
        self.model.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self, loss_is_finite: bool = True) -> StepOutcome:
        """See `StepOptimizer.step`."""
        lr = self.lr
        # A step that is skipped changes no state.
        with accelerator.cuda_literals():
            overflow = self.inner.prepare_grads()
            norm = float(self.inner.get_grad_norm())
            if overflow or not loss_is_finite or not math.isfinite(norm):
                return StepOutcome(grad_norm=norm, lr=lr, skipped=True)
            for group in self.inner.param_groups:
                group["lr"] = lr * group.get("lr_mult", 1.0)
            # megatron-core's function would copy each gradient where Apex is not installed.
            factor = self.gradient_clip_val / (norm + 1e-6) if self.gradient_clip_val > 0 else 1.0
            parameters = (
                p for part in self.inner.chained_optimizers for p in part.get_parameters()
            )
            gradients = [p.grad for p in parameters if p.grad is not None]
            if factor < 1.0 and gradients:
                torch._foreach_mul_(gradients, factor)
            self.inner.step_with_ready_grads()
        self._collected = False
        self.steps += 1
        return StepOutcome(grad_norm=norm, lr=lr, skipped=False)

    def collect_weights(self) -> None:
        """See `StepOptimizer.collect_weights`. Otherwise the next forward pass gathers them."""
        if self.model.ddp_config.overlap_param_gather and not self._collected:
            with accelerator.cuda_literals():
                self.model.start_param_sync(force_sync=True)
            self._collected = True

    def defer_weight_gather(self) -> None:
        """From now on, gather weights in the forward pass (distributed optimizer only)."""
        model = self.model
        if model.ddp_config.use_distributed_optimizer and not model.use_forward_hook:
            model.ddp_config.overlap_param_gather = True
            model.use_forward_hook = True
            model.enable_forward_pre_hook()

    def gather_weights_after_updates(self, param_sync: bool = True) -> None:
        """Undo `defer_weight_gather`. ``param_sync``: whether to also gather the weights now."""
        if not self.model.use_forward_hook:
            return
        with accelerator.cuda_literals():
            self.model.disable_forward_pre_hook(param_sync)
        self.model.use_forward_hook = False
        self.model.ddp_config.overlap_param_gather = False

    def moment_states(self) -> Iterator[dict[str, Any]]:
        """See `StepOptimizer.moment_states`."""
        for part in self.inner.chained_optimizers:
            yield from part.optimizer.state.values()

    def park_gradients(self) -> None:
        """Free the gradient buffers and move float32 copies of bfloat16 weights to the host."""
        weights = {storage_id(parameter) for parameter in self.model.parameters()}
        mains = [piece.main for piece in self.owned_slices()]
        self._parked.to_host(params=False, grads=True)
        self._parked.park(copied=[m for m in mains if storage_id(m) not in weights], freed=[])

    def restore_gradients(self) -> None:
        """Undo `park_gradients`. All gradients are then 0."""
        self._parked.to_device()

    def restore(self) -> None:
        """Move gradient buffers, float32 weights and the Adam moments back to the device."""
        self.restore_gradients()
        super().restore()

    def copy_model_weights(self) -> None:
        """Copy the model's weights to the optimizer's float32 copies, if any."""
        self.restore_gradients()
        with accelerator.cuda_literals():
            self.inner.reload_model_params()

    # Run state --------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """True if weights and moments are sharded over the data-parallel ranks."""
        return bool(self.model.ddp_config.use_distributed_optimizer)

    def owned_slices(self) -> Iterator[OwnedSlice]:
        """Yield the elements that this process updates, at most one range of each parameter."""
        if not self.is_distributed:
            inner = {
                id(main): part.optimizer
                for part in self.inner.chained_optimizers
                for main in part.get_parameters()
            }
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    main = getattr(parameter, "main_param", parameter)
                    yield OwnedSlice(parameter, 0, main, inner[id(main)])
            return
        # The distributed optimizer: ranges of its buffers that this rank updates.
        for part in self.inner.chained_optimizers:
            groups = zip(
                [*part.model_fp32_groups, *part.model_float16_groups],
                [*part.shard_fp32_groups, *part.shard_fp32_from_float16_groups],
                strict=True,
            )
            for parameters, mains in groups:
                for parameter, main in zip(parameters, mains, strict=True):
                    buffer, dtypes, bucket = part.model_param_gbuf_map[parameter]
                    ranges = part.gbuf_ranges[buffer][dtypes][bucket]["param_map"][parameter]
                    yield OwnedSlice(parameter, ranges["param"].start, main, part.optimizer)

    def publish_weights(self) -> None:
        """Compute the model's weights from the float32 slices of all data-parallel ranks."""
        with accelerator.cuda_literals():
            for part in self.inner.chained_optimizers:
                part._copy_main_params_to_model_params()
            self.model.start_param_sync(force_sync=True)
