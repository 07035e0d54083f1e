"""One rollout: which sample is in which slot, how long it is, and when it is done.

`Responses` is the device's half: tokens sampled so far, and the step that samples the next. It
reads no value of the device, and a step overwrites what it keeps for the one after it. So on a GPU
the host can run ahead of it, and a step of a shape that has come before is one launch, a CUDA
graph. Graphs are of two sizes, rows and span, both rounded up: few are made.

`Rollout` is the host's half. It reads what a step sampled while the next one runs, so a sequence
that ends takes part in one step more, whose token is taken back. What is sampled for the others
does not depend on it.

A graph has the addresses of what it reads and writes, so it can be launched in a later rollout as
long as these are the same: a `Responses` may be filled again.

Shape legend: ``B`` samples, ``n`` sequences in flight, ``S`` longest possible sequence.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from aligner.config import LengthParams, SamplingParams
from aligner.data.tokenizers.decoding import StopStrings
from aligner.device import accelerator
from aligner.device.accelerator import HostCopy
from aligner.errors import AlignerError
from aligner.models.gpt.decode.kv_cache import aligned
from aligner.models.gpt.decode.model import IncrementalModel
from aligner.models.gpt.decode.sampling import (
    SampledTokens,
    check_finite,
    counter_uniforms,
    sample_tokens,
)

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


_PREFILL_TOKENS = 8192  # most tokens (padding included) of one prefill pass, if it has two prompts


# Called with a row of the prompts, the token just sampled for it, and its log-prob.
TokenListener = Callable[[int, int, float], None]


class WideNucleusError(AlignerError):
    """A nucleus had more tokens than a step looks at for which the host does not wait."""


@dataclass(frozen=True)
class _Drawn:
    """A step that the host has not read: its samples, how many new tokens each then had, and what
    is on its way: tokens [n], log-probs [n], ``wide`` [].
    """

    samples: list[int]
    made: list[int]
    values: HostCopy


class Rollout:
    """State of B samples from prompt to end; results are read from the public tensors.

    ``tokens`` int64 [B, S]; ``logprobs`` float32 [B, S]; ``kept_ids`` int32 [B, S, K]; ``lengths``
    int64 [B], prompt and response; ``is_end`` bool [B].
    """

    def __init__(
        self,
        responses: Responses,
        rows: Sequence[tuple[int, ...]],
        rules: RolloutRules,
        *,
        stop: StopStrings | None,
        listener: TokenListener | None = None,
        runs_ahead: bool = False,
        waits: bool = True,
        captured: bool = False,
    ) -> None:
        """All samples wait. ``rows``: the tokens of each prompt of ``responses``, without padding.

        ``runs_ahead``: a step is read while the next one runs. ``waits``: the host may wait for the
        device within a step, too. ``captured``: steps become CUDA graphs, where the model can.
        """
        batch = len(rows)
        self._responses = responses
        self.tokens = self._responses.tokens[:batch]
        self.logprobs = self._responses.logprobs[:batch]
        self.kept_ids = self._responses.kept_ids[:batch]
        self.lengths = self._responses.lengths[:batch]
        self.is_end = torch.zeros(batch, dtype=torch.bool, device=self.tokens.device)

        self._prompts = rows
        self._prompt_lengths = [len(row) for row in rows]
        self._made = [0] * batch  # new tokens of each sample
        self._texts: list[list[int]] = [[] for _ in range(batch)]  # kept for stop strings
        self._ended: set[int] = set()
        self._length, self._stop = rules.length, stop
        self._listener = listener
        self.heard = [0] * batch  # tokens of each sample that the listener knows
        self._eos = set(rules.eos_ids)
        self._runs_ahead, self._waits, self._captured = runs_ahead, waits, captured
        self._unread: deque[_Drawn] = deque()

        self._waiting = list(range(batch))[::-1]
        self._flight: list[int | None] = []  # sample in each slot; None: the slot is free
        self._last_hidden: dict[tuple[int, ...], Tensor] = {}
        self._batch: Batch | None = None  # the flight, while it stays as it is

    def run(self, model: IncrementalModel, num_slots: int) -> None:
        """Generate until every sample has ended.

        Raises:
            NonFiniteError: as in `aligner.models.gpt.decode.sampling.sample_tokens`.
            WideNucleusError: a rollout that does not wait met a nucleus that needs it to.
        """
        while self._waiting or self._flight:
            while self._waiting and self._fill_slots(model, num_slots):
                pass
            self._close_gaps(model)
            if self._flight:
                self._advance(model, num_slots)
        self._read(unread=0)

    # Steps ------------------------------------------------------------------------------------

    def _advance(self, model: IncrementalModel, num_slots: int) -> None:
        """One more token for every sequence in flight."""
        samples = [s for s in self._flight if s is not None]
        longest = max(map(self._length_of, samples))
        # In the shapes of graphs without graphs, too: the same tokens with and without.
        shaped = self._runs_ahead and model.can_be_captured
        if shaped:
            longest = span_of_graph(longest, model.cache.capacity)
        if self._batch is None:
            rows = rows_of_graph(len(samples), num_slots) if shaped else None
            self._batch = self._responses.batch(samples, rows)
        batch = self._batch
        self._responses.advance(
            model,
            batch,
            longest,
            banning=self._banning(samples),
            waits=self._waits,
            captured=shaped and self._captured,
        )
        self._note(samples, batch)

    def _fill_slots(self, model: IncrementalModel, num_slots: int) -> bool:
        """Prompts of waiting samples into free slots, and their first tokens; False: no slot."""
        free = [slot for slot, sample in enumerate(self._flight) if sample is None]
        free += range(len(self._flight), num_slots)
        placed = {slot: self._waiting.pop() for slot in free[: len(self._waiting)]}
        if not placed:
            return False
        self._copy_known_prompts(model, placed)
        self._prefill_new_prompts(model, placed)
        self._flight += [None] * (max(placed) + 1 - len(self._flight))
        for slot, sample in placed.items():
            self._flight[slot] = sample
        self._batch = None
        samples = list(placed.values())
        hidden = torch.stack([self._last_hidden[self._prompts[sample]] for sample in samples])
        still_waiting = {self._prompts[sample] for sample in self._waiting}
        self._last_hidden = {p: h for p, h in self._last_hidden.items() if p in still_waiting}
        batch = self._responses.batch(samples)
        self._responses.sample(
            model, batch, hidden, banning=self._banning(samples), waits=self._waits
        )
        self._note(samples, batch)
        return True

    def _copy_known_prompts(self, model: IncrementalModel, placed: dict[int, int]) -> None:
        """Samples whose prompt is in flight already take its keys and values from there."""
        holders = {
            self._prompts[sample]: slot
            for slot, sample in enumerate(self._flight)
            if sample is not None
        }
        for prompt in [p for p in self._last_hidden if p not in holders]:
            del self._last_hidden[prompt]  # its keys and values are gone
        pairs = [
            (holders[prompt], slot)
            for slot, sample in placed.items()
            if (prompt := self._prompts[sample]) in self._last_hidden
        ]
        self._move(model, pairs, max((self._prompt_lengths[s] for s in placed.values()), default=0))

    def _prefill_new_prompts(self, model: IncrementalModel, placed: dict[int, int]) -> None:
        """Each distinct prompt runs once; all slots that want it take its keys and values."""
        wanted: dict[tuple[int, ...], list[int]] = {}
        for slot, sample in placed.items():
            prompt = self._prompts[sample]
            if prompt not in self._last_hidden:
                wanted.setdefault(prompt, []).append(slot)
        for chunk in _prefill_chunks(sorted(wanted, key=len)):
            width = aligned(len(chunk[-1]))
            tokens = torch.zeros(len(chunk), width, dtype=torch.int64)
            for row, prompt in zip(tokens, chunk, strict=True):
                row[: len(prompt)] = torch.tensor(prompt)
            pairs = [(source, slot) for source, p in enumerate(chunk) for slot in wanted[p]]
            hidden = model.prefill(
                tokens,
                [len(prompt) for prompt in chunk],
                [slot for _, slot in pairs],
                [source for source, _ in pairs],
            )
            self._last_hidden.update(zip(chunk, hidden.unbind(), strict=True))

    def _close_gaps(self, model: IncrementalModel) -> None:
        """Move the last sequences into free slots: decoding takes the first n."""
        count = sum(sample is not None for sample in self._flight)
        gaps = [slot for slot in range(count) if self._flight[slot] is None]
        late = [s for s in range(count, len(self._flight)) if self._flight[s] is not None]
        moves = list(zip(late, gaps, strict=True))
        samples = [s for slot in late if (s := self._flight[slot]) is not None]
        self._move(model, moves, max(map(self._length_of, samples), default=0))
        for source, target in moves:
            self._flight[target] = self._flight[source]
        del self._flight[count:]

    def _note(self, samples: list[int], batch: Batch) -> None:
        """A step is under way: count its tokens, and read what the one before drew."""
        for sample in samples:
            self._made[sample] += 1
            if self._made[sample] == self._length.max_length:
                self._leave(sample)
        values = HostCopy(batch.tokens, batch.logprobs, batch.wide)
        self._unread.append(_Drawn(samples, [self._made[s] for s in samples], values))
        self._read(unread=1 if self._runs_ahead else 0)

    def _read(self, unread: int) -> None:
        """Read steps, oldest first, until this many are left; end the samples they end."""
        while len(self._unread) > unread:
            sampled = self._unread.popleft()
            tokens, logprobs, wide = sampled.values.wait()
            if not self._waits:
                check_finite(logprobs[: len(sampled.samples)])
                if bool(wide):
                    raise WideNucleusError("top-p keeps more tokens than a step looks at")
            ended = []
            logprobs_of_step = [] if self._listener is None else logprobs.tolist()
            steps = zip(sampled.samples, sampled.made, tokens.tolist(), strict=False)
            for place, (sample, made, token) in enumerate(steps):
                if sample in self._ended:
                    continue
                if self._listener is not None and made > self.heard[sample]:
                    self.heard[sample] = made
                    self._listener(sample, token, logprobs_of_step[place])
                if self._ends(sample, token):
                    ended.append((sample, made))
            self._end(ended)

    def _end(self, ended: list[tuple[int, int]]) -> None:
        """End samples that ended by themselves; ``ended``: with their numbers of new tokens."""
        if not ended:
            return
        surplus = [(sample, made) for sample, made in ended if made < self._made[sample]]
        for sample, made in ended:
            self._ended.add(sample)
            self._made[sample] = made
            self._leave(sample)
        self.is_end[self._index([sample for sample, _ in ended])] = True
        if surplus:
            samples = [sample for sample, _ in surplus]
            self._responses.take_back(samples, [self._length_of(sample) for sample in samples])

    def _leave(self, sample: int) -> None:
        """Free the slot of a sample, where it has one."""
        if sample in self._flight:
            self._flight[self._flight.index(sample)] = None
            self._batch = None

    def _ends(self, sample: int, token: int) -> bool:
        """Return whether the response ends by itself with its newest token."""
        if token in self._eos:
            return True  # before min_length it could not have been sampled
        if self._stop is None:
            return False
        response = self._texts[sample]
        response.append(token)
        if len(response) < self._length.min_length:
            return False
        return self._stop.completed(self._prompts[sample], response)

    # Small things -------------------------------------------------------------------------------

    def _move(self, model: IncrementalModel, pairs: list[tuple[int, int]], length: int) -> None:
        """Copy the first ``length`` tokens' keys and values from slot to slot."""
        if pairs:
            source, target = zip(*pairs, strict=True)
            model.cache.copy(self._index(source), self._index(target), length)

    def _banning(self, samples: list[int]) -> bool:
        """Return whether one of the samples is too short to end with its next token."""
        return min(self._made[sample] for sample in samples) + 1 < self._length.min_length

    def _length_of(self, sample: int) -> int:
        return self._prompt_lengths[sample] + self._made[sample]

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return self._responses.index(numbers)


def _prefill_chunks(prompts: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Cut prompts, shortest first, into passes of at most `_PREFILL_TOKENS` padded tokens."""
    chunks: list[list[tuple[int, ...]]] = []
    for prompt in prompts:
        fits = chunks and (len(chunks[-1]) + 1) * aligned(len(prompt)) <= _PREFILL_TOKENS
        if fits:
            chunks[-1].append(prompt)
        else:
            chunks.append([prompt])
    return chunks
