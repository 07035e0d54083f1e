"""Host part of a rollout: assigns samples to slots, counts their tokens, and ends them.

    pending samples ──fill free slots──► prefill ──► step ──► step ──► …   (device)
                           ▲                            │ copies
                           └── free slots ◄── read the previous step ◄─┘   (host)

`Rollout` reads the tokens of a step while the next step runs. The next step therefore samples a
token for a sequence that has ended. This token is removed.

Shape legend: ``B`` samples, ``n`` sequences in flight, ``S`` longest possible sequence.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aligner.data.tokenizers.decoding import StopStrings
from aligner.device.accelerator import HostCopy
from aligner.errors import AlignerError
from aligner.models.gpt.decode.kv_cache import aligned
from aligner.models.gpt.decode.model import DecodingModel
from aligner.models.gpt.decode.responses import (
    Batch,
    Responses,
    RolloutRules,
    rows_of_graph,
    span_of_graph,
)
from aligner.models.gpt.decode.sampling import check_finite

_PREFILL_TOKENS = 8192  # maximum number of padded tokens in a prefill pass of several prompts


# Function of the index of a sample, its new token, and the token's log-prob.
TokenListener = Callable[[int, int, float], None]


class WideNucleusError(AlignerError):
    """A top-p nucleus has more tokens than a step without synchronisation can consider."""


class Rollout:
    """Samples responses to B prompts, and contains the results.

    ``tokens``: int64 [B, S]. ``logprobs``: float32 [B, S]. ``kept_ids``: int32 [B, S, K].
    ``lengths``: int64 [B], length of prompt and response. ``is_end``: bool [B], the response ended
    by EOS or a stop string.
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
        may_wait: bool = True,
        captured: bool = False,
    ) -> None:
        """Queue all samples.

        ``rows``: token ids of each prompt without padding. ``runs_ahead``: the host reads the
        result of a step while the next step runs. ``may_wait``: the host may wait for the device
        within a step. ``captured``: launch steps as CUDA graphs, if the model supports graphs.
        """
        # Results: views of the responses. The last row, a dummy, belongs to unused slots.
        batch = len(rows)
        self._responses = responses
        self.tokens = self._responses.tokens[:batch]
        self.logprobs = self._responses.logprobs[:batch]
        self.kept_ids = self._responses.kept_ids[:batch]
        self.lengths = self._responses.lengths[:batch]
        self.is_end = torch.zeros(batch, dtype=torch.bool, device=self.tokens.device)

        # State of each sample on the host.
        self._prompts = rows
        self._prompt_lengths = [len(row) for row in rows]
        self._num_new = [0] * batch  # new tokens of each sample
        self._texts: list[list[int]] = [[] for _ in range(batch)]  # new tokens, for stop strings
        self._ended: set[int] = set()
        self._length, self._stop = rules.length, stop
        self._listener = listener
        self.num_reported = [0] * batch  # tokens of each sample reported to the listener
        self._eos = set(rules.eos_ids)
        self._runs_ahead, self._may_wait, self._captured = runs_ahead, may_wait, captured
        # Steps that the host has not read: samples, numbers of their new tokens after the step, and
        # copies of tokens [n], log-probs [n] and ``wide`` [].
        self._unread: deque[tuple[list[int], list[int], HostCopy]] = deque()

        # State of the slots. Prompts with pending samples have a last hidden state.
        self._pending = list(range(batch))[::-1]
        self._slots: list[int | None] = []  # sample in each slot, None in a free slot
        self._last_hidden: dict[tuple[int, ...], Tensor] = {}
        self._batch: Batch | None = None  # batch of the samples in the slots, until they change

    def run(self, model: DecodingModel, num_slots: int) -> None:
        """Sample until every response has ended.

        Raises the errors of `sample_tokens`, and WideNucleusError (only without ``may_wait``).
        """
        while self._pending or self._slots:
            while self._pending and self._fill_slots(model, num_slots):
                pass
            self._close_gaps(model)
            if self._slots:
                self._advance(model, num_slots)
        self._read(unread=0)

    # Steps ------------------------------------------------------------------------------------

    def _advance(self, model: DecodingModel, num_slots: int) -> None:
        samples = [s for s in self._slots if s is not None]
        longest = max(map(self._length_of, samples))
        # Shapes are rounded even without graphs, so that results are the same with and without.
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
            may_wait=self._may_wait,
            captured=shaped and self._captured,
        )
        self._finish_step(samples, batch)

    def _fill_slots(self, model: DecodingModel, num_slots: int) -> bool:
        """Put pending samples into free slots, and sample first tokens. False if none was put."""
        # Assign samples to slots.
        free = [slot for slot, sample in enumerate(self._slots) if sample is None]
        free += range(len(self._slots), num_slots)
        assigned = {slot: self._pending.pop() for slot in free[: len(self._pending)]}
        if not assigned:
            return False
        # Copy keys and values of prompts that are in flight already, and compute the others.
        self._copy_prompts_in_flight(model, assigned)
        self._prefill_new_prompts(model, assigned)
        self._slots += [None] * (max(assigned) + 1 - len(self._slots))
        for slot, sample in assigned.items():
            self._slots[slot] = sample
        self._batch = None
        # Sample the first tokens from the prompts' last hidden states.
        samples = list(assigned.values())
        hidden = torch.stack([self._last_hidden[self._prompts[sample]] for sample in samples])
        pending = {self._prompts[sample] for sample in self._pending}
        self._last_hidden = {p: h for p, h in self._last_hidden.items() if p in pending}
        batch = self._responses.batch(samples)
        self._responses.sample(
            model, batch, hidden, banning=self._banning(samples), may_wait=self._may_wait
        )
        self._finish_step(samples, batch)
        return True

    def _copy_prompts_in_flight(self, model: DecodingModel, assigned: dict[int, int]) -> None:
        """Copy keys and values to assigned slots whose prompt is already in another slot."""
        slot_of_prompt = {
            self._prompts[sample]: slot
            for slot, sample in enumerate(self._slots)
            if sample is not None
        }
        for prompt in [p for p in self._last_hidden if p not in slot_of_prompt]:
            del self._last_hidden[prompt]  # keys and values are overwritten
        pairs = [
            (slot_of_prompt[prompt], slot)
            for slot, sample in assigned.items()
            if (prompt := self._prompts[sample]) in self._last_hidden
        ]
        longest = max((self._prompt_lengths[s] for s in assigned.values()), default=0)
        self._move(model, pairs, longest)

    def _prefill_new_prompts(self, model: DecodingModel, assigned: dict[int, int]) -> None:
        """Run each new prompt once, and store its keys and values in all of its slots."""
        slots_of_prompt: dict[tuple[int, ...], list[int]] = {}
        for slot, sample in assigned.items():
            prompt = self._prompts[sample]
            if prompt not in self._last_hidden:
                slots_of_prompt.setdefault(prompt, []).append(slot)
        # One pass per chunk of similar lengths, with all slots of its prompts.
        for chunk in _prefill_chunks(sorted(slots_of_prompt, key=len)):
            width = aligned(len(chunk[-1]))
            tokens = torch.zeros(len(chunk), width, dtype=torch.int64)
            for row, prompt in zip(tokens, chunk, strict=True):
                row[: len(prompt)] = torch.tensor(prompt)
            pairs = [(index, slot) for index, p in enumerate(chunk) for slot in slots_of_prompt[p]]
            hidden = model.prefill(
                tokens,
                [len(prompt) for prompt in chunk],
                [slot for _, slot in pairs],
                [source for source, _ in pairs],
            )
            self._last_hidden.update(zip(chunk, hidden.unbind(), strict=True))

    def _close_gaps(self, model: DecodingModel) -> None:
        """Move the last sequences into free slots, because decoding uses the first n slots."""
        count = sum(sample is not None for sample in self._slots)
        gaps = [slot for slot in range(count) if self._slots[slot] is None]
        late = [s for s in range(count, len(self._slots)) if self._slots[s] is not None]
        moves = list(zip(late, gaps, strict=True))
        samples = [s for slot in late if (s := self._slots[slot]) is not None]
        self._move(model, moves, max(map(self._length_of, samples), default=0))
        for source, target in moves:
            self._slots[target] = self._slots[source]
        del self._slots[count:]

    def _finish_step(self, samples: list[int], batch: Batch) -> None:
        """Count the tokens of the step just launched, and read the previous step's results."""
        for sample in samples:
            self._num_new[sample] += 1
            if self._num_new[sample] == self._length.max_length:
                self._free_slot(sample)
        values = HostCopy(batch.tokens, batch.logprobs, batch.wide)
        self._unread.append((samples, [self._num_new[s] for s in samples], values))
        self._read(unread=1 if self._runs_ahead else 0)

    def _read(self, unread: int) -> None:
        """Read results of steps, oldest first, until ``unread`` remain. End finished samples."""
        while len(self._unread) > unread:
            samples, num_new_tokens, values = self._unread.popleft()
            tokens, logprobs, wide = values.wait()
            if not self._may_wait:
                check_finite(logprobs[: len(samples)])
                if bool(wide):
                    raise WideNucleusError("top-p keeps more tokens than the candidates of a step")
            # Tokens of samples that ended in an earlier step are ignored.
            ended = []
            listed_logprobs = [] if self._listener is None else logprobs.tolist()
            entries = zip(samples, num_new_tokens, tokens.tolist(), strict=False)
            for index, (sample, num_new, token) in enumerate(entries):
                if sample in self._ended:
                    continue
                if self._listener is not None and num_new > self.num_reported[sample]:
                    self.num_reported[sample] = num_new
                    self._listener(sample, token, listed_logprobs[index])
                if self._ends(sample, token):
                    ended.append((sample, num_new))
            self._end(ended)

    def _end(self, ended: list[tuple[int, int]]) -> None:
        """End samples after their last token. ``ended``: samples and their new-token counts."""
        if not ended:
            return
        surplus = [sample for sample, num_new in ended if num_new < self._num_new[sample]]
        for sample, num_new in ended:
            self._ended.add(sample)
            self._num_new[sample] = num_new
            self._free_slot(sample)
        self.is_end[self._responses.index([sample for sample, _ in ended])] = True
        if surplus:
            self._responses.remove_last_tokens(surplus, [self._length_of(s) for s in surplus])

    def _free_slot(self, sample: int) -> None:
        if sample in self._slots:
            self._slots[self._slots.index(sample)] = None
            self._batch = None

    def _ends(self, sample: int, token: int) -> bool:
        """Return whether the new ``token`` ends the response: EOS, or the end of a stop string."""
        if token in self._eos:
            return True  # banned before min_length
        if self._stop is None:
            return False
        response = self._texts[sample]
        response.append(token)
        if len(response) < self._length.min_length:
            return False
        return self._stop.completed(self._prompts[sample], response)

    def _move(self, model: DecodingModel, pairs: list[tuple[int, int]], length: int) -> None:
        if pairs:
            sources, targets = map(self._responses.index, zip(*pairs, strict=True))
            model.cache.copy(sources, targets, length)

    def _banning(self, samples: list[int]) -> bool:
        """Return whether one of the samples is too short to end with its next token."""
        return min(self._num_new[sample] for sample in samples) + 1 < self._length.min_length

    def _length_of(self, sample: int) -> int:
        return self._prompt_lengths[sample] + self._num_new[sample]


def _prefill_chunks(prompts: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Split prompts, shortest first, into passes of at most `_PREFILL_TOKENS` padded tokens."""
    chunks: list[list[tuple[int, ...]]] = []
    for prompt in prompts:
        if not chunks or (len(chunks[-1]) + 1) * aligned(len(prompt)) > _PREFILL_TOKENS:
            chunks.append([])
        chunks[-1].append(prompt)
    return chunks
