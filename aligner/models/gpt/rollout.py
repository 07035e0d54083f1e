"""One rollout: which sample is in which slot, what it has so far, and when it is done.

Shape legend: ``B`` samples, ``n`` sequences in flight, ``S`` longest possible sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.config import LengthParams, SamplingParams
from aligner.models.gpt.incremental import IncrementalModel
from aligner.models.gpt.kv_cache import aligned
from aligner.models.gpt.sampling import SampledTokens, counter_uniforms, sample_tokens
from aligner.models.gpt.stop_strings import StopStrings

_PREFILL_TOKENS = 8192  # most tokens (padding included) of one prefill pass, if it has two prompts


# Called with a row of the prompts and the token just drawn for it.
TokenListener = Callable[[int, int], None]


@dataclass
class _Batch:
    """Samples whose next tokens are drawn together, and what a step knows for the one after it.

    All int64 [n]: ``rows``, the samples; ``starts``, lengths of their prompts; ``positions``, where
    their next tokens go; ``tokens``, the last ones drawn (None: look them up).
    """

    samples: list[int]
    rows: Tensor
    starts: Tensor
    positions: Tensor
    tokens: Tensor | None = None


class Rollout:
    """State of B samples from prompt to end; results are read from the public tensors.

    ``tokens`` int64 [B, S]; ``logprobs`` float32 [B, S]; ``lengths`` int64 [B], prompt and
    response; ``is_end`` bool [B].
    """

    def __init__(
        self,
        prompts: Tensor,
        prompt_lengths: Tensor,
        sample_ids: Tensor,
        *,
        seed: int,
        greedy: bool,
        vocab_size: int,
        eos_ids: Sequence[int],
        pad_id: int,
        length: LengthParams,
        sampling: SamplingParams,
        stop: StopStrings | None,
        listener: TokenListener | None = None,
    ) -> None:
        """All samples wait; arguments as of `aligner.models.gpt.generation.Generator`."""
        batch, columns = prompts.shape
        device = prompts.device
        self.tokens = torch.full(
            (batch, columns + length.max_length), pad_id, dtype=torch.int64, device=device
        )
        within = torch.arange(columns, device=device) < prompt_lengths[:, None]
        self.tokens[:, :columns] = torch.where(within, prompts, pad_id)
        self.logprobs = torch.zeros(self.tokens.shape, device=device)
        self.lengths = prompt_lengths.clone()
        self.is_end = torch.zeros(batch, dtype=torch.bool, device=device)

        self._prompt_lengths: list[int] = prompt_lengths.tolist()
        self._prompts = [
            tuple(row[:n]) for row, n in zip(prompts.tolist(), self._prompt_lengths, strict=True)
        ]
        self._made = [0] * batch  # new tokens of each sample
        self._responses: list[list[int]] = [[] for _ in range(batch)]  # kept for stop strings
        new_positions = prompt_lengths[:, None] + torch.arange(length.max_length, device=device)
        self._uniforms = counter_uniforms(
            seed, sample_ids[:, None].expand_as(new_positions), new_positions
        )
        self._greedy = greedy
        self._length, self._sampling, self._stop = length, sampling, stop
        self._listener = listener
        self._end_ids = torch.tensor(eos_ids, dtype=torch.int64, device=device)
        self._eos = set(eos_ids)
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self._seen = _tokens_seen(prompts, within, vocab_size)

        self._waiting = list(range(batch))[::-1]
        self._flight: list[int | None] = []  # sample in each slot; None: the slot is free
        self._last_hidden: dict[tuple[int, ...], Tensor] = {}
        self._batch: _Batch | None = None  # the flight, while it stays as it is

    def run(self, model: IncrementalModel, num_slots: int) -> None:
        """Generate until every sample has ended."""
        while self._waiting or self._flight:
            while self._waiting and self._fill_slots(model, num_slots):
                pass
            self._close_gaps(model)
            if self._flight:
                self._advance(model)

    # Steps ------------------------------------------------------------------------------------

    def _advance(self, model: IncrementalModel) -> None:
        """One more token for every sequence in flight."""
        if self._batch is None:
            self._batch = self._make_batch([s for s in self._flight if s is not None])
        batch = self._batch
        last = batch.positions - 1
        tokens = self.tokens[batch.rows, last] if batch.tokens is None else batch.tokens
        longest = max(map(self._length_of, batch.samples))
        self._draw(model, batch, model.decode(tokens, last, longest))

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
        self._draw(model, self._make_batch(samples), hidden)
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
                tokens.to(self.tokens.device),
                self._index([len(prompt) for prompt in chunk]),
                self._index([slot for _, slot in pairs]),
                self._index([source for source, _ in pairs]),
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

    def _draw(self, model: IncrementalModel, batch: _Batch, hidden: Tensor) -> None:
        """Sample the next token of each row, write it down, free the slots of ended samples."""
        rows, positions = batch.rows, batch.positions
        made = positions - batch.starts
        banned = None
        if min(self._made[sample] for sample in batch.samples) + 1 < self._length.min_length:
            banned = made + 1 < self._length.min_length

        def draw() -> SampledTokens:
            return sample_tokens(
                model.logits(hidden),
                self._uniforms[rows, made],
                self._sampling,
                greedy=self._greedy,
                seen=None if self._seen is None else self._seen[rows],
                banned=banned,
                end_ids=self._end_ids,
            )

        drawn = model.stages.drawn_by_last(len(batch.samples), draw)
        self.tokens[rows, positions] = drawn.tokens
        self.logprobs[rows, positions] = drawn.logprobs
        batch.positions, batch.tokens = positions + 1, drawn.tokens
        self.lengths[rows] = batch.positions
        if self._seen is not None:
            self._seen[rows, drawn.tokens] = True
        self._note(batch.samples, drawn.tokens.tolist())

    def _note(self, samples: list[int], tokens: list[int]) -> None:
        """Free the slots of the samples that their newest tokens end."""
        ended, full = [], []
        for sample, token in zip(samples, tokens, strict=True):
            self._made[sample] += 1
            if self._listener is not None:
                self._listener(sample, token)
            if self._ends(sample, token):
                ended.append(sample)
            elif self._made[sample] == self._length.max_length:
                full.append(sample)
        if ended:
            self.is_end[self._index(ended)] = True
        for sample in ended + full:
            self._flight[self._flight.index(sample)] = None
            self._batch = None

    def _ends(self, sample: int, token: int) -> bool:
        """Whether the response ends by itself with its newest token."""
        if token in self._eos:
            return True  # before min_length it could not have been drawn
        if self._stop is None:
            return False
        response = self._responses[sample]
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

    def _make_batch(self, samples: list[int]) -> _Batch:
        rows = self._index(samples)
        starts = self._index([self._prompt_lengths[sample] for sample in samples])
        return _Batch(samples, rows, starts, self.lengths[rows])

    def _length_of(self, sample: int) -> int:
        return self._prompt_lengths[sample] + self._made[sample]

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.tokens.device)


def _tokens_seen(prompts: Tensor, within: Tensor, vocab_size: int) -> Tensor:
    """Bool [B, V]: the token occurs in the prompt."""
    seen = torch.zeros(prompts.shape[0], vocab_size + 1, dtype=torch.bool, device=prompts.device)
    seen.scatter_(1, torch.where(within, prompts, vocab_size), True)
    return seen[:, :vocab_size]


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
