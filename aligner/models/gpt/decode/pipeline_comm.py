"""Messages between pipeline stages while generating: hidden rows forward, tokens to everyone.

    stage 0: embed, layers ──rows [n, H]──► stage 1: layers ── … ──► last stage: layers, sample
       ▲                                       ▲                             │
       └───────────────────────────────────────┴───────── tokens [n] ────────┘

One pass is under way at a time. Every stage keeps the same books of the rollout, so each knows the
shape of the next message beforehand.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.distributed import accelerator
from aligner.errors import AlignerError
from aligner.models.gpt.decode.sampling import SampledTokens

_NOTHING_DRAWN = -1


class PipelineComm:
    """This process's place in the pipeline; with one stage nothing is sent."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """``group``: the stages in order. ``device``: of the rows and the tokens."""
        self._group = group
        self._device = device
        self._rank, self._last = dist.get_rank(group), dist.get_world_size(group) - 1

    @property
    def is_first(self) -> bool:
        """True if the rows begin here, as embeddings."""
        return self._rank == 0

    @property
    def is_last(self) -> bool:
        """True if tokens are sampled here."""
        return self._rank == self._last

    def receive(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Hidden rows of ``shape`` from the stage before this one."""
        rows = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(rows, group=self._group, group_src=self._rank - 1)
        return rows

    def pass_on(self, rows: Tensor) -> None:
        """Send float hidden rows [n, H] to the next stage; the last stage keeps them."""
        if not self.is_last:
            dist.send(rows.contiguous(), group=self._group, group_dst=self._rank + 1)

    def sampled_by_last(self, count: int, sample: Callable[[], SampledTokens]) -> SampledTokens:
        """Result of ``sample`` on the last stage for ``count`` rows, on every stage.

        Raises:
            AlignerError: what ``sample`` raised there, on every stage.
        """
        if self._last == 0:
            return sample()
        # One message: tokens, and the 32 bits of their log-probs.
        message = torch.full((2, count), _NOTHING_DRAWN, dtype=torch.int64, device=self._device)
        failure: AlignerError | None = None
        if self.is_last:
            try:
                sampled = sample()
                message[0], message[1] = sampled.tokens, sampled.logprobs.view(torch.int32)
            except AlignerError as error:
                failure = error
        dist.broadcast(message, group=self._group, group_src=self._last)
        tokens, bits = message
        if bool((tokens == _NOTHING_DRAWN).any()):
            raise self._failure_of_last(failure)
        return SampledTokens(tokens, bits.to(torch.int32).view(torch.float32))

    def _failure_of_last(self, failure: AlignerError | None) -> AlignerError:
        box = [failure]
        dist.broadcast_object_list(
            box, group=self._group, group_src=self._last, device=accelerator.device()
        )
        assert box[0] is not None
        return box[0]
