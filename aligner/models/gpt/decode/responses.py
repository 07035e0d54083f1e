"""Device part of a rollout: the tokens sampled so far, and the step that samples the next tokens.

A step reads no value from the device. The host can therefore run ahead of a GPU, and launch a
repeated step as a CUDA graph. A graph has a fixed number of rows, a fixed attention span and fixed
addresses. Later rollouts therefore refill the same `Responses`.

Shape legend: ``B`` samples, ``n`` sequences in flight, ``S`` longest possible sequence.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from aligner.config import LengthParams, SamplingParams
from aligner.device import accelerator
from aligner.models.gpt.decode.model import DecodingModel
from aligner.models.gpt.decode.sampling import SampledTokens, counter_uniforms, sample_tokens

# The span of attention is rounded up to a multiple of _MIN_SPAN_STEP or, if that is larger, of its
# power of two divided by _SPAN_STEPS.
_MIN_SPAN_STEP = 128
_SPAN_STEPS = 2
_ROW_STEP = 64  # rows are rounded up to a multiple of this, fewer rows to a power of two


@dataclass
class Batch:
    """n samples whose next tokens one step samples. The step updates all but the first two."""

    rows: Tensor  # int64 [n], indices of the samples in `Responses`
    starts: Tensor  # int64 [n], lengths of the prompts
    positions: Tensor  # int64 [n], indices of the next tokens in the sequences
    tokens: Tensor  # int64 [n], last tokens
    logprobs: Tensor  # float32 [n], log-probs of the last tokens
    wide: Tensor  # bool [], see `sample_tokens`


class PromptRows(NamedTuple):
    """Prompts of B samples."""

    tokens: Tensor  # int64 [B, P], right-padded
    lengths: Tensor  # int64 [B]
    sample_ids: Tensor  # int64 [B]


@dataclass(frozen=True)
class RolloutRules:
    """Rules for sampling the tokens of a rollout (see `Generator` of `decode.generator`)."""

    seed: int
    greedy: bool
    vocab_size: int
    eos_ids: tuple[int, ...]
    pad_id: int
    length: LengthParams
    sampling: SamplingParams
    record_kept: int = 0  # maximum number of ids, kept by top-k and top-p, to record per token


class Responses:
    """Prompts and sampled tokens of B samples. The last row is a dummy sample that pads batches.

    ``tokens``: int64 [B + 1, S]. ``logprobs``: float32 [B + 1, S]. ``lengths``: int64 [B + 1].
    ``kept_ids``: int32 [B + 1, S, K], see `SampledTokens`. K is 0 if ids are not recorded.
    """

    def __init__(
        self, prompts: PromptRows, rules: RolloutRules, shape: tuple[int, int] = (0, 0)
    ) -> None:
        """Store the prompts and allocate responses. ``shape``: minimum of [B + 1, S]."""
        # The result tensors, with the prompts.
        length = rules.length
        batch, columns = prompts.tokens.shape
        device = prompts.tokens.device
        shape = max(batch + 1, shape[0]), max(columns + length.max_length, shape[1])
        self.tokens = torch.full(shape, rules.pad_id, dtype=torch.int64, device=device)
        within = torch.arange(columns, device=device) < prompts.lengths[:, None]
        self.tokens[:batch, :columns] = torch.where(within, prompts.tokens, rules.pad_id)
        self.logprobs = torch.zeros(self.tokens.shape, device=device)
        self.kept_ids = torch.full(
            (*self.tokens.shape, rules.record_kept), -1, dtype=torch.int32, device=device
        )
        unused = shape[0] - batch
        self.lengths = torch.cat((prompts.lengths, prompts.lengths.new_ones(unused)))
        self._starts = self.lengths.clone()
        # The uniform numbers of all new tokens.
        new_positions = prompts.lengths[:, None] + torch.arange(length.max_length, device=device)
        uniforms = counter_uniforms(
            rules.seed, prompts.sample_ids[:, None].expand_as(new_positions), new_positions
        )
        self._uniforms = torch.cat((uniforms, uniforms.new_zeros(unused, length.max_length)))
        self._rules = rules
        self._end_ids = self.index(rules.eos_ids)
        # With a repetition penalty, bool [B + unused, V]: the token occurs in the prompt or the
        # response. Padding is written to an extra column.
        self._history_mask: Tensor | None = None
        if rules.sampling.repetition_penalty != 1.0:
            padding = rules.vocab_size
            mask = self.tokens.new_zeros(shape[0], padding + 1, dtype=torch.bool)
            mask[:batch].scatter_(1, torch.where(within, prompts.tokens, padding), True)
            self._history_mask = mask[:, :padding]
        self._graph_batches: dict[int, Batch] = {}  # read and written by graphs, by count of rows
        self._graphs: dict[tuple[int, int, bool], Callable[[], None] | None] = {}
        self._graph_memory = accelerator.graph_memory()

    def refill(self, source: "Responses") -> None:
        """Copy ``source``, which must have the same shape and, except the seed, the same rules."""
        for name, tensor in vars(source).items():
            if isinstance(tensor, Tensor):
                getattr(self, name).copy_(tensor)

    def batch(self, samples: Sequence[int], rows: int | None = None) -> Batch:
        """Return a batch of samples.

        With ``rows``, the dummy sample pads the batch to this number of rows, and the memory of the
        last batch with as many rows is reused.
        """
        padding = [self.tokens.shape[0] - 1] * ((rows or 0) - len(samples))
        chosen = self.index([*samples, *padding])
        self.lengths[-1:].fill_(1)  # assigning a scalar would copy it and synchronise
        positions = self.lengths[chosen]
        batch = Batch(
            chosen,
            self._starts[chosen],
            positions,
            self.tokens[chosen, positions - 1],
            torch.zeros(chosen.shape, device=chosen.device),
            torch.zeros((), dtype=torch.bool, device=chosen.device),
        )
        # Graphs read and write fixed addresses.
        if rows is None:
            return batch
        graph_batch = self._graph_batches.setdefault(rows, batch)
        for field in dataclasses.fields(Batch):
            getattr(graph_batch, field.name).copy_(getattr(batch, field.name))
        return graph_batch

    def sample(
        self, model: DecodingModel, batch: Batch, hidden: Tensor, *, banning: bool, may_wait: bool
    ) -> None:
        """Sample and store the next token of each row, from final hidden states [n, H].

        ``banning``: whether ``min_length`` forbids some rows to end. ``may_wait``: see
        `sample_tokens`.
        """
        rows, positions = batch.rows, batch.positions
        num_new = positions - batch.starts

        def sample() -> SampledTokens:
            return sample_tokens(
                model.logits(hidden),
                self._uniforms[rows, num_new],
                self._rules.sampling,
                greedy=self._rules.greedy,
                history_mask=None if self._history_mask is None else self._history_mask[rows],
                banned=num_new + 1 < self._rules.length.min_length if banning else None,
                end_ids=self._end_ids,
                may_wait=may_wait,
                record=self._rules.record_kept,
            )

        # Store the tokens, and update the batch in place for the next step.
        sampled = model.stages.sampled_by_last(len(rows), sample, self._rules.record_kept)
        self.tokens[rows, positions] = sampled.tokens
        self.logprobs[rows, positions] = sampled.logprobs
        if sampled.kept_ids is not None:
            self.kept_ids[rows, positions] = sampled.kept_ids
        if self._history_mask is not None:
            self._history_mask[rows, sampled.tokens] = True
        batch.positions += 1
        self.lengths[rows] = batch.positions
        batch.tokens.copy_(sampled.tokens)
        batch.logprobs.copy_(sampled.logprobs)
        if sampled.wide is not None:
            batch.wide.copy_(sampled.wide)

    def advance(
        self,
        model: DecodingModel,
        batch: Batch,
        longest: int,
        *,
        banning: bool,
        may_wait: bool,
        captured: bool,
    ) -> None:
        """Run the model on the last tokens of ``batch``, and sample the next tokens.

        Row i of the batch [n] must be in slot i. ``longest``: upper bound of the sequence lengths.
        ``captured``: launch the step as a CUDA graph. The first step of each shape runs without a
        graph, because it loads kernels.
        """

        def step() -> None:
            hidden = model.decode(batch.tokens, batch.positions - 1, longest)
            self.sample(model, batch, hidden, banning=banning, may_wait=may_wait)

        key = (len(batch.rows), longest, banning)
        if not captured:
            step()
        elif key not in self._graphs:
            self._graphs[key] = None
            step()
        else:
            graph = self._graphs[key]
            if graph is None:
                graph = self._graphs[key] = accelerator.capture(step, self._graph_memory)
            graph()

    def forget_graphs(self) -> None:
        """Free the graphs and their memory."""
        self._graphs.clear()
        self._graph_batches.clear()

    def remove_last_tokens(self, samples: Sequence[int], lengths: Sequence[int]) -> None:
        """Remove the last token of each sample. ``lengths``: the samples' lengths afterwards."""
        rows, positions = self.index(samples), self.index(lengths)
        self.tokens[rows, positions] = self._rules.pad_id
        self.logprobs[rows, positions] = 0.0
        self.kept_ids[rows, positions] = -1
        self.lengths[rows] = positions

    def index(self, values: Sequence[int]) -> Tensor:
        """Return ``values`` as an int64 tensor [n] on the device, without synchronising."""
        return torch.tensor(values, dtype=torch.int64).to(self.tokens.device, non_blocking=True)


def rows_of_graph(sequences: int, slots: int) -> int:
    """Round a number of sequences up to the rows of a CUDA graph, at most ``slots``."""
    if sequences > _ROW_STEP:
        return min(slots, -(-sequences // _ROW_STEP) * _ROW_STEP)
    return min(slots, 1 << (sequences - 1).bit_length())


def span_of_graph(longest: int, capacity: int) -> int:
    """Round a sequence length up to the attention span of a CUDA graph, at most ``capacity``."""
    step = max(_MIN_SPAN_STEP, (1 << (longest.bit_length() - 1)) // _SPAN_STEPS)
    return min(capacity, -(-longest // step) * step)


def with_headroom(length: int) -> int:
    """Round ``length`` up, so that slightly longer rollouts can reuse the same memory."""
    step = max(64, (1 << (length.bit_length() - 1)) // 4)
    return -(-length // step) * step
