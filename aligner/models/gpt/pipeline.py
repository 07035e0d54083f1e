"""One pass of micro-batches through the model, forward and (if asked) backward.

This is the only place that speaks megatron-core's schedule protocol: a forward step that returns
``(output, closure)``, where the closure turns the last stage's output into a loss or a result.

    microbatches ─► forward_step ─► GPTModel (bypassed output layer) ─► hidden [B, S, H]
                                                                            │
                                      head(hidden, microbatch) ◄────────────┘
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from aligner.distributed import accelerator
from aligner.models.gpt.hidden_states import bypassed_output_layer

Microbatch = Mapping[str, Tensor]
Result = TypeVar("Result")
LossHead = Callable[[Tensor, Microbatch], tuple[Tensor, Result]]
InferenceHead = Callable[[Tensor, Microbatch], Result]


def split_microbatches(batch: Microbatch, size: int) -> list[dict[str, Tensor]]:
    """Cut a batch into rows of ``size`` (the last may be smaller), each as long as it needs to be.

    Per-token tensors ``[B, S]`` are trimmed to the longest sequence of the micro-batch, which
    ``input_lengths`` tells.
    """
    rows, length = batch["input_ids"].shape
    microbatches = []
    for start in range(0, rows, size):
        part = {key: value[start : start + size] for key, value in batch.items()}
        longest = int(part["input_lengths"].max())
        microbatches.append(
            {
                key: value[:, :longest] if value.dim() > 1 and value.shape[1] == length else value
                for key, value in part.items()
            }
        )
    return microbatches


def train_microbatches(
    model: nn.Module, microbatches: Sequence[Microbatch], head: LossHead[Result]
) -> list[Result]:
    """Forward and backward; gradients are added to the gradient buffers, summed over ranks.

    Returns what ``head`` returned beside the loss, per micro-batch, on the last pipeline stage.
    """
    return _run(model, microbatches, head, forward_only=False)


def infer_microbatches(
    model: nn.Module, microbatches: Sequence[Microbatch], head: InferenceHead[Result]
) -> list[Result]:
    """Forward without gradients; ``head``'s results per micro-batch, on the last stage."""
    with torch.no_grad():
        return _run(model, microbatches, head, forward_only=True)


def _run(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    head: Callable[[Tensor, Microbatch], Any],
    forward_only: bool,
) -> list[Any]:
    def loss_closure(
        microbatch: Microbatch, hidden: Tensor, non_loss_data: bool = False
    ) -> tuple[Tensor, Tensor, Any] | Any:
        if non_loss_data:
            return head(hidden, microbatch)
        loss, result = head(hidden, microbatch)
        # The loss is divided already: a token count of 0 tells the schedule to leave it alone.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

    def forward_step(
        data: Iterator[Microbatch], stage: nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        microbatch = next(data)
        ids = microbatch["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        with bypassed_output_layer(unwrap_model(stage)):
            hidden = stage(ids, positions, None)
        return hidden, partial(loss_closure, microbatch)

    rows, length = microbatches[0]["input_ids"].shape
    with accelerator.cuda_literals():
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=[model],
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
