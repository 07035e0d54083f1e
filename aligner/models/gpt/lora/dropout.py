"""Dropout of what adapters read, the same on every layout.

Whether a number is dropped is decided by a hash of the seed, the update, the adapter, the sequence,
the position in it and the feature. A sequence is known by its tokens, so neither the row it stands
in, nor the micro-batch, nor the rank matters.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from aligner.kernels.counter_hash import UNIFORM_BITS, combine, counter_hash, uniform_bits


class TokenDropout:
    """Dropout state that the adapters of one model share: the tokens of the present pass."""

    def __init__(self, probability: float, seed: int) -> None:
        self.probability = probability
        self.update = 0  # number of the optimizer update that a pass belongs to
        self._seed = seed
        self._keys: Tensor | None = None

    @contextlib.contextmanager
    def of_pass(self, input_ids: Tensor, lengths: Tensor, held: Tensor) -> Iterator[None]:
        """The block in which a forward pass drops out.

        Args:
            input_ids: int64 ``[b, S]``, right-padded.
            lengths: int64 ``[b]``.
            held: int64 ``[n, L]``, index into ``b * S`` of the token that stands there in the
                model, negative where none does.
        """
        position = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        inside = position < lengths[:, None]
        tokens = counter_hash(self._seed, position, input_ids) * inside
        # A sum of hashes does not depend on the padding.
        rows = tokens.sum(dim=1, keepdim=True) + self.update
        keys = combine(rows, position).flatten()
        if keys.numel() == 0:  # a micro-batch without sequences still goes through the model
            keys = keys.new_zeros(1)
        self._keys = keys[held.clamp(min=0)].t()[:, :, None]
        try:
            yield
        finally:
            self._keys = None

    def __call__(self, hidden: Tensor, stream: int, *, part: int, parts: int, first: int) -> Tensor:
        """``hidden`` with some of it dropped and the rest scaled up.

        Args:
            hidden: ``[L / parts, n, features]``.
            stream: of the adapter.
            part: which of the ``parts`` of a row these tokens are.
            parts: over how many ranks tokens are shared out.
            first: number of the first feature here, of those that all ranks hold together.
        """
        assert self._keys is not None, "adapters drop out in forward passes of micro-batches only"
        keys = self._keys.chunk(parts)[part]
        feature = torch.arange(first, first + hidden.shape[-1], device=hidden.device)
        drawn = uniform_bits(combine(keys, counter_hash(stream, feature)))
        kept = drawn >= int(self.probability * 2**UNIFORM_BITS)
        return hidden * kept.to(hidden.dtype) * (1.0 / (1.0 - self.probability))
