"""The device's half of a rollout: tokens sampled so far, and the step that samples the next.

It reads no value of the device, and a step overwrites what it keeps for the one after it. So on a
GPU the host can run ahead of it, and a step of a shape that has come before is one launch, a CUDA
graph. Graphs are of two sizes, rows and span, both rounded up: few are made.

A graph has the addresses of what it reads and writes, so it can be launched in a later rollout as
long as these are the same: a `Responses` may be filled again.

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
from aligner.models.gpt.decode.model import IncrementalModel
from aligner.models.gpt.decode.sampling import SampledTokens, counter_uniforms, sample_tokens

_LEAST_SPAN_STEP = 128  # spans of attention are rounded up to a multiple of it,
_SPAN_STEPS = 2  # or of this part of the power of two below them
_ROW_STEP = 64  # more rows than this are rounded up to a multiple of it, fewer to a power of two


@dataclass
class Batch:
    """Samples whose next tokens are sampled together; a step updates all but the first two.

    int64 [n] ``rows``, the samples; ``starts``, lengths of their prompts; ``positions``, where
    their next tokens go; ``tokens``, the last ones sampled. float32 [n] ``logprobs`` of these. bool
    [] ``wide``: a nucleus was wider than what was looked at (`sample_tokens`).
    """

    rows: Tensor
    starts: Tensor
    positions: Tensor
    tokens: Tensor
    logprobs: Tensor
    wide: Tensor


class Prompts(NamedTuple):
    """``tokens`` int64 [B, P], right-padded; ``lengths`` int64 [B]; ``sample_ids`` int64 [B]."""

    tokens: Tensor
    lengths: Tensor
    sample_ids: Tensor


@dataclass(frozen=True)
class RolloutRules:
    """Rules by which the tokens of a rollout are sampled; see `Generator` of `decode.generator`."""

    seed: int
    greedy: bool
    vocab_size: int
    eos_ids: tuple[int, ...]
    pad_id: int
    length: LengthParams
    sampling: SamplingParams
    record_kept: int = 0  # most tokens that a filter keeps which are recorded with each sampled


class Responses:
    """Tokens of B samples, and of one more that stands for none, the last row.

    ``tokens`` int64 [B + 1, S]; ``logprobs`` float32 [B + 1, S]; ``lengths`` int64 [B + 1];
    ``kept_ids`` int32 [B + 1, S, K], see `SampledTokens`, K is 0 where nothing is recorded.
    """

    def __init__(
        self, prompts: Prompts, rules: RolloutRules, shape: tuple[int, int] = (0, 0)
    ) -> None:
        """Batch of prompts without responses. ``shape``: least [B + 1, S], the rest is unused."""
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
        new_positions = prompts.lengths[:, None] + torch.arange(length.max_length, device=device)
        uniforms = counter_uniforms(
            rules.seed, prompts.sample_ids[:, None].expand_as(new_positions), new_positions
        )
        self._uniforms = torch.cat((uniforms, uniforms.new_zeros(unused, length.max_length)))
        self._rules = rules
        self._end_ids = self.index(rules.eos_ids)
        self._seen: Tensor | None = None
        if rules.sampling.repetition_penalty != 1.0:
            # Bool [B + unused, V]: the token occurs in the prompt. Padding goes to one more column.
            padding = rules.vocab_size
            seen = self.tokens.new_zeros(shape[0], padding + 1, dtype=torch.bool)
            seen[:batch].scatter_(1, torch.where(within, prompts.tokens, padding), True)
            self._seen = seen[:, :padding]
        self._kept: dict[int, Batch] = {}  # by number of rows: what graphs read and write
        self._graphs: dict[tuple[int, int, bool], Callable[[], None] | None] = {}
        self._graph_memory = accelerator.graph_memory()

    def refill(self, other: "Responses") -> None:
        """Take the content of ``other``, which has the same shape and rules but for the seed."""
        for name, tensor in vars(other).items():
            if isinstance(tensor, Tensor):
                getattr(self, name).copy_(tensor)

    def batch(self, samples: Sequence[int], rows: int | None = None) -> Batch:
        """Batch of these samples, padded to ``rows`` with the one that stands for no sample.

        With ``rows`` its tensors are those of the last batch with this many rows.
        """
        nobody = [self.tokens.shape[0] - 1] * ((rows or 0) - len(samples))
        chosen = self.index([*samples, *nobody])
        self.lengths[-1:].fill_(1)  # a single number that is assigned is a copy, and a wait
        positions = self.lengths[chosen]
        batch = Batch(
            chosen,
            self._starts[chosen],
            positions,
            self.tokens[chosen, positions - 1],
            torch.zeros(chosen.shape, device=chosen.device),
            torch.zeros((), dtype=torch.bool, device=chosen.device),
        )
        if rows is None:
            return batch
        kept = self._kept.setdefault(rows, batch)
        for field in dataclasses.fields(Batch):
            getattr(kept, field.name).copy_(getattr(batch, field.name))
        return kept

    def sample(
        self, model: IncrementalModel, batch: Batch, hidden: Tensor, *, banning: bool, waits: bool
    ) -> None:
        """Sample the next token of each row from final hidden states [n, H] and write it down.

        ``banning``: some rows are too short to end. ``waits``: see `sample_tokens`.
        """
        rows, positions = batch.rows, batch.positions
        made = positions - batch.starts

        def sample() -> SampledTokens:
            return sample_tokens(
                model.logits(hidden),
                self._uniforms[rows, made],
                self._rules.sampling,
                greedy=self._rules.greedy,
                seen=None if self._seen is None else self._seen[rows],
                banned=made + 1 < self._rules.length.min_length if banning else None,
                end_ids=self._end_ids,
                waits=waits,
                record=self._rules.record_kept,
            )

        sampled = model.stages.sampled_by_last(len(rows), sample, self._rules.record_kept)
        self.tokens[rows, positions] = sampled.tokens
        self.logprobs[rows, positions] = sampled.logprobs
        if sampled.kept is not None:
            self.kept_ids[rows, positions] = sampled.kept
        if self._seen is not None:
            self._seen[rows, sampled.tokens] = True
        batch.positions += 1
        self.lengths[rows] = batch.positions
        batch.tokens.copy_(sampled.tokens)
        batch.logprobs.copy_(sampled.logprobs)
        if sampled.wide is not None:
            batch.wide.copy_(sampled.wide)

    def advance(
        self,
        model: IncrementalModel,
        batch: Batch,
        longest: int,
        *,
        banning: bool,
        waits: bool,
        captured: bool,
    ) -> None:
        """One more token for the batch, whose samples are in the first n slots.

        ``longest``: no sequence has more tokens. ``captured``: by a CUDA graph from the second step
        of a shape on, for batches of so many ``rows``; the first step loads what kernels need.
        """

        def step() -> None:
            hidden = model.decode(batch.tokens, batch.positions - 1, longest)
            self.sample(model, batch, hidden, banning=banning, waits=waits)

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
        """Free what they hold."""
        self._graphs.clear()
        self._kept.clear()

    def take_back(self, samples: Sequence[int], lengths: Sequence[int]) -> None:
        """Remove the last token of each sample, down to ``lengths``."""
        rows, places = self.index(samples), self.index(lengths)
        self.tokens[rows, places] = self._rules.pad_id
        self.logprobs[rows, places] = 0.0
        self.kept_ids[rows, places] = -1
        self.lengths[rows] = places

    def index(self, numbers: Sequence[int]) -> Tensor:
        """int64 [n] on the device; the host does not wait."""
        return torch.tensor(numbers, dtype=torch.int64).to(self.tokens.device, non_blocking=True)


def rows_of_graph(sequences: int, slots: int) -> int:
    """Number of rows of a captured step for this many sequences; at most ``slots``."""
    if sequences > _ROW_STEP:
        return min(slots, -(-sequences // _ROW_STEP) * _ROW_STEP)
    return min(slots, 1 << (sequences - 1).bit_length())


def span_of_graph(longest: int, capacity: int) -> int:
    """The span that a captured step attends over; at most ``capacity``."""
    step = max(_LEAST_SPAN_STEP, (1 << (longest.bit_length() - 1)) // _SPAN_STEPS)
    return min(capacity, -(-longest // step) * step)


def with_room(length: int) -> int:
    """``length`` rounded up, so that what is a little longer next time fits the same memory."""
    step = max(64, (1 << (length.bit_length() - 1)) // 4)
    return -(-length // step) * step
