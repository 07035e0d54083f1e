"""The host's half of a rollout: which sample is in which slot, how long it is, and when it is done.

`Rollout` reads what a step sampled while the next one runs (`aligner.models.gpt.decode.responses`),
so a sequence that ends takes part in one step more, whose token is taken back. What is sampled for
the others does not depend on it.

Shape legend: ``B`` samples, ``n`` sequences in flight, ``S`` longest possible sequence.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.data.tokenizers.decoding import StopStrings
from aligner.device.accelerator import HostCopy
from aligner.errors import AlignerError
from aligner.models.gpt.decode.kv_cache import aligned
from aligner.models.gpt.decode.model import IncrementalModel
from aligner.models.gpt.decode.responses import (
    Batch,
    Responses,
    RolloutRules,
    rows_of_graph,
    span_of_graph,
)
from aligner.models.gpt.decode.sampling import check_finite

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
