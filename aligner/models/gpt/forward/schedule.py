"""Forward pass of micro-batches through the model, and backward pass in training.

Only this module implements megatron-core's schedule protocol: a forward step returns ``(output,
closure)``, and the closure computes a loss or a result from the last stage's output.

    microbatches ─► forward_step ─► GPTModel (bypassed output layer) ─► hidden [n, L, H]
                                                                            │
                                      head(hidden, microbatch) ◄────────────┘

Heads project selected positions to the vocabulary (`aligner.logprobs.fused`).
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


@contextlib.contextmanager
def placed_positions(gpt: GPTModel, layout: TokenLayout) -> Iterator[None]:
    """Make rotary embeddings use the positions of a packed layout inside the block."""
    rotary = getattr(gpt, "rotary_pos_emb", None)
    if layout.segments is None or rotary is None:
        yield
        return
    # Attributes of the instance precede the methods: angles [L, 1, 1, D] of the layout's rows, and
    # the length argument, which is then ignored.
    angles = rotary.get_emb(layout.longest)[layout.positions[0]]
    rotary.forward = lambda *args, **kwargs: angles
    rotary.get_rotary_seq_len = lambda *args: len(angles)
    try:
        yield
    finally:
        del rotary.forward, rotary.get_rotary_seq_len


def full_hidden_states(gpt: GPTModel, hidden: Tensor, *, vocab_parallel: bool) -> Tensor:
    """Gather sequence-parallel hidden states, float ``[n, L, H]``, to rows ``[n * L, H]``.

    ``vocab_parallel``: whether each tensor-parallel rank uses the rows for its part of the
    vocabulary. Backward then sums the ranks' gradients.
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
    """Rows of a batch, trimmed to their longest sequence, and their layout in the model."""

    columns: Mapping[str, Tensor]  # see `aligner.types`, [b] or [b, S, ...]
    layout: TokenLayout
    selected: BoolArray  # [b, S] on the host: ``token_mask``, or all false if the column is missing
    hidden: Tensor | None = None  # [n, L, H], output of the last stage, if already computed


# Number of sequences per micro-batch, or [first row, last row + 1] of each, which may be empty.
MicroBatches = int | Sequence[Sequence[int]]
# Function of hidden states on the last stage. In training it returns the loss and a result.
Head = Callable[[Tensor, Microbatch], Any]
# megatron-core's type: (micro-batches, this stage of the model) -> (output, closure).
ForwardStep = Callable[[Iterator[Microbatch], nn.Module], tuple[Tensor, Callable[..., Any]]]


def row_bounds(rows: int, micro_batches: MicroBatches) -> list[tuple[int, int]]:
    """Return (first row, last row + 1) of each micro-batch, one empty micro-batch for 0 rows."""
    if isinstance(micro_batches, int):
        starts = range(0, max(1, rows), micro_batches)
        return [(start, min(start + micro_batches, rows)) for start in starts]
    return [(start, end) for start, end in micro_batches] or [(0, 0)]


def split_microbatches(
    batch: Mapping[str, Tensor], bounds: Sequence[tuple[int, int]], rules: LayoutRules
) -> list[Microbatch]:
    """Split a batch into the micro-batches with row ranges ``bounds``.

    Per-token tensors ``[B, S]`` are trimmed to the micro-batch's longest sequence. The host waits
    for the device once, to read the columns on which the layout depends.
    """
    length = batch["input_ids"].shape[1]
    # One copy to the host for all columns that the layout depends on.
    names = ["input_lengths", *(name for name in ("token_mask", "position_ids") if name in batch)]
    if rules.shared_prefixes:
        names.append("input_ids")
    copies = accelerator.HostCopy(*(batch[name] for name in names)).wait()
    host = {name: copy.numpy() for name, copy in zip(names, copies, strict=True)}
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
        # Layout: several sequences per row if their positions say so, then shared prefixes.
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
    """Run the next micro-batch through a pipeline stage, as megatron-core's schedule requires.

    Returns the stage's output (of the last stage: hidden states ``[n, L, H]``), and a function that
    applies ``head`` to the output.
    """
    microbatch = next(data_iterator)
    hidden = microbatch.hidden if microbatch.hidden is not None else _forward(microbatch, model)

    def closure(output: Tensor, non_loss_data: bool = False) -> tuple[Tensor, Tensor, Any] | Any:
        if non_loss_data:
            return head(output, microbatch)
        loss, result = head(output, microbatch)
        # The loss is already normalised. With a token count of 0 the schedule does not divide it.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

    return hidden, closure


def _forward(microbatch: Microbatch, model: nn.Module) -> Tensor:
    layout, gpt = microbatch.layout, unwrap_model(model)
    packed = None if layout.segments is None else SegmentParams(segments=layout.segments)
    positions, dropout = placed_positions(gpt, layout), adapter_dropout(gpt, microbatch)
    with bypassed_output_layer(gpt), positions, dropout:
        return model(layout.input_ids, layout.positions, None, packed_seq_params=packed)


def loss_head(
    outputs: Callable[[Tensor, Microbatch], TokenOutputs],
    loss_fn: LossFunction,
    denominators: Denominators,
) -> Head:
    """Return a head that computes a loss. ``outputs``: function of hidden states ``[n, L, H]``."""

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
    """Run forward passes, and unless ``forward_only`` backward passes.

    Gradients are summed over data-parallel ranks in the gradient buffers. On the last pipeline
    stage, returns for each micro-batch the second value that the function from ``step`` returned.
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
    """Run forward passes without gradients and dropout.

    Returns the head's result for each micro-batch, on the last pipeline stage. ``with_graph``: keep
    the autograd graph of the hidden states (only for models without dropout).
    """
    training = model.training
    model.train(with_graph)
    try:
        with torch.set_grad_enabled(with_graph):
            return run_microbatches(model, microbatches, step, forward_only=True)
    finally:
        model.train(training)


@contextlib.contextmanager
def adapter_dropout(gpt: GPTModel, microbatch: Microbatch) -> Iterator[None]:
    """Inside the block, derive the masks of the adapters' dropout from the micro-batch's tokens."""
    dropout = cast(TokenDropout | None, getattr(gpt, "adapter_dropout", None))
    if dropout is None or not gpt.training:
        yield
        return
    columns, ids = microbatch.columns, microbatch.layout.input_ids
    frame_indices = torch.from_numpy(microbatch.layout.frame_indices).to(ids.device).view_as(ids)
    positions = columns.get("position_ids")
    with dropout.of_pass(columns["input_ids"], columns["input_lengths"], frame_indices, positions):
        yield
