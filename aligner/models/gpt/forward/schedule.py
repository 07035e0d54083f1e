"""One pass of micro-batches through the model, forward and (if asked) backward.

This is the only place that speaks megatron-core's schedule protocol: a forward step that returns
``(output, closure)``, where the closure turns the last stage's output into a loss or a result. A
role binds the head of `forward_step`.

    microbatches ─► forward_step ─► GPTModel (bypassed output layer) ─► hidden [n, L, H]
                                                                            │
                                      head(hidden, microbatch) ◄────────────┘

The model's logits are never computed: its output layer is bypassed, and what needs the vocabulary
works on selected positions of the final hidden states (`aligner.logprobs.fused`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from aligner.device import accelerator
from aligner.distributed.sequences import Sequences, shared_prefixes
from aligner.logprobs.output_layer import bypassed_output_layer
from aligner.models.gpt.forward.token_layout import (
    BoolArray,
    LayoutRules,
    TokenLayout,
    build_layout,
)
from aligner.models.gpt.layers.attention import SegmentParams
from aligner.models.gpt.lora import TokenDropout
from aligner.types import Denominators, LossFunction, TokenOutputs


class PlacedRotary(nn.Module):
    """Stands where the rotary embedding was and answers for the positions of one layout.

    megatron-core's own counts from the start of the row, or cuts it as it would be cut for
    Transformer Engine.
    """

    def __init__(self, rotary: nn.Module, layout: TokenLayout) -> None:
        super().__init__()
        self.angles = rotary.get_emb(layout.longest)[layout.positions[0]]

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Length to ask `forward` for; it does not matter."""
        del args, kwargs
        return self.angles.shape[0]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Angles ``[L, 1, 1, D]`` of the layout's rows."""
        del args, kwargs
        return self.angles


@contextlib.contextmanager
def placed_positions(gpt: GPTModel, layout: TokenLayout) -> Iterator[None]:
    """Give rotary embeddings the layout's positions; without segments they are those anyway."""
    original = gpt._modules.get("rotary_pos_emb")
    if layout.segments is None or original is None:
        yield
        return
    gpt._modules["rotary_pos_emb"] = PlacedRotary(original, layout)
    try:
        yield
    finally:
        gpt._modules["rotary_pos_emb"] = original


def full_hidden_states(gpt: GPTModel, hidden: Tensor, *, vocab_parallel: bool) -> Tensor:
    """Undo sequence parallelism on float ``[n, L, H]`` and place the tensor-parallel gradient sum.

    Returns ``[n * L, H]``, the rows that `TokenLayout` counts.

    ``vocab_parallel``: what follows is sharded over the vocabulary, so each rank's gradient is a
    partial one that must be summed. Otherwise every rank computes the same and none is summed.
    """
    if gpt.config.sequence_parallel:
        gathered = gather_from_sequence_parallel_region(
            hidden.transpose(0, 1), tensor_parallel_output_grad=vocab_parallel
        )
        return gathered.transpose(0, 1).flatten(0, 1)
    rows = hidden.flatten(0, 1)
    return copy_to_tensor_model_parallel_region(rows) if vocab_parallel else rows


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a batch, trimmed to the longest of them, and how they stand in the model."""

    columns: Mapping[str, Tensor]  # of `aligner.types`, [b] or [b, S, ...]
    layout: TokenLayout
    selected: BoolArray  # [b, S] on the host: ``token_mask``, or nowhere where there is none
    hidden: Tensor | None = None  # [n, L, H] of the last stage, where its pass was made before


# Sequences per micro-batch, or [first row, last row + 1] of each; a micro-batch may be empty.
MicroBatches = int | Sequence[Sequence[int]]
# What the last stage makes of hidden states; in training a pair of the loss and a result.
Head = Callable[[Tensor, Microbatch], Any]
# megatron-core's: (micro-batches, this stage of the model) -> (output, closure over the output).
ForwardStep = Callable[[Iterator[Microbatch], nn.Module], tuple[Tensor, Callable[..., Any]]]


def row_bounds(rows: int, micro_batches: MicroBatches) -> list[tuple[int, int]]:
    """Rows of each micro-batch; at least one micro-batch, which is empty if there are no rows."""
    if isinstance(micro_batches, int):
        starts = range(0, max(1, rows), micro_batches)
        return [(start, min(start + micro_batches, rows)) for start in starts]
    return [(start, end) for start, end in micro_batches] or [(0, 0)]


def split_microbatches(
    batch: Mapping[str, Tensor], bounds: Sequence[tuple[int, int]], rules: LayoutRules
) -> list[Microbatch]:
    """Cut a batch into micro-batches, each as long as it needs to be.

    Per-token tensors ``[B, S]`` are trimmed to the longest sequence of the micro-batch, which
    ``input_lengths`` gives. The host waits for the device once, for lengths and ``token_mask``, for
    ``position_ids`` where rows may hold several sequences, and for the token ids where prefixes are
    shared.
    """
    length = batch["input_ids"].shape[1]
    wanted = ["input_lengths", *(name for name in ("token_mask", "position_ids") if name in batch)]
    if rules.shared_prefixes:
        wanted.append("input_ids")
    copies = accelerator.HostCopy(*(batch[name] for name in wanted)).wait()
    host = {name: copy.numpy() for name, copy in zip(wanted, copies, strict=True)}
    lengths = host["input_lengths"]
    selected = np.zeros(batch["input_ids"].shape, np.bool_)
    if "token_mask" in host:
        selected = host["token_mask"] != 0
    microbatches = []
    for start, end in bounds:
        longest = int(lengths[start:end].max(initial=1))
        columns = {
            key: value[start:end, :longest]
            if value.dim() > 1 and value.shape[1] == length
            else value[start:end]
            for key, value in batch.items()
        }
        part, sequences = lengths[start:end], None
        if "position_ids" in host:
            sequences = Sequences.find(host["position_ids"][start:end, :longest], part)
        tree = None
        if rules.shared_prefixes:
            ids, sizes = host["input_ids"][start:end, :longest], part
            if sequences is not None:
                ids, sizes = sequences.cut(ids), sequences.lengths
            tree = shared_prefixes(ids, sizes, rules.sequence_multiple)
        layout = build_layout(columns["input_ids"], part, rules, tree, sequences)
        microbatches.append(Microbatch(columns, layout, selected[start:end, :longest]))
    return microbatches


def forward_step(
    data_iterator: Iterator[Microbatch], model: nn.Module, *, head: Head
) -> tuple[Tensor, Callable[..., Any]]:
    """megatron-core's forward step of every role.

    Returns this stage's output (on the last one hidden states ``[n, L, H]``: the output layer is
    bypassed) and what the schedule calls with it, which asks ``head``.
    """
    microbatch = next(data_iterator)
    hidden = microbatch.hidden if microbatch.hidden is not None else _forward(microbatch, model)

    def closure(output: Tensor, non_loss_data: bool = False) -> tuple[Tensor, Tensor, Any] | Any:
        if non_loss_data:
            return head(output, microbatch)
        loss, result = head(output, microbatch)
        # The loss is divided already: a token count of 0 keeps the schedule from dividing it.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

    return hidden, closure


def _forward(microbatch: Microbatch, model: nn.Module) -> Tensor:
    layout, gpt = microbatch.layout, unwrap_model(model)
    packed = None if layout.segments is None else SegmentParams(segments=layout.segments)
    with bypassed_output_layer(gpt), placed_positions(gpt, layout), dropped_out(gpt, microbatch):
        return model(layout.input_ids, layout.positions, None, packed_seq_params=packed)


def loss_head(
    outputs: Callable[[Tensor, Microbatch], TokenOutputs],
    loss_fn: LossFunction,
    denominators: Denominators,
) -> Head:
    """The head that ends in ``loss_fn``; ``outputs`` takes float hidden states ``[n, L, H]``."""

    def head(hidden: Tensor, microbatch: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = loss_fn(outputs(hidden, microbatch), microbatch.columns, denominators)
        return loss, {**metrics, "loss": loss.detach()}

    return head


def run_microbatches(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    step: ForwardStep,
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Forward and backward; gradients are added to the gradient buffers, summed over ranks.

    Returns what the head of ``step`` returned beside the loss, per micro-batch, on the last
    pipeline stage. ``forward_only``: see `infer_microbatches`.
    """
    rows, length = microbatches[0].layout.input_ids.shape
    with accelerator.cuda_literals():
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(microbatches),
            model=[model],
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def infer_microbatches(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    step: ForwardStep,
    *,
    with_graph: bool = False,
) -> list[Any]:
    """Forward without gradients or dropout; what the head of ``step`` returned, on the last stage.

    Whatever phase the model is in: what is asked of it before the first phase, or between two
    updates, is not to be dropped out.

    ``with_graph``: the head gets hidden states that can be differentiated, as training makes them;
    for models without dropout.
    """
    training = model.training
    model.train(with_graph)
    try:
        with torch.set_grad_enabled(with_graph):
            return run_microbatches(model, microbatches, step, forward_only=True)
    finally:
        model.train(training)


@contextlib.contextmanager
def dropped_out(gpt: GPTModel, microbatch: Microbatch) -> Iterator[None]:
    """The block of a forward pass in which the adapters' dropout knows the tokens."""
    dropout = getattr(gpt, "adapter_dropout", None)
    if dropout is None or not gpt.training:
        yield
        return
    columns, layout = microbatch.columns, microbatch.layout
    held = torch.from_numpy(layout.held).to(layout.input_ids.device).view_as(layout.input_ids)
    known = cast(TokenDropout, dropout)
    positions = columns.get("position_ids")
    with known.of_pass(columns["input_ids"], columns["input_lengths"], held, positions):
        yield
