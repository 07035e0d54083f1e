"""The part of a rotary embedding that pairs the two halves of a head."""

from torch import Tensor


def add_turned(source: Tensor, target: Tensor, sin: Tensor, sign: float = 1.0) -> None:
    """Add ``source`` turned by a right angle, times ``sin``, to ``target``, in place.

    With ``target = source * cos`` before, it is the rotation after; ``sign=-1`` turns back.

    Args:
        source: ``[..., D]``; its first ``D_rot / 2`` columns pair with the next.
        target: the same shape.
        sin: ``[..., D_rot / 2]``, broadcast.
        sign: 1 or -1.
    """
    half = sin.shape[-1]
    first, second = slice(0, half), slice(half, 2 * half)
    target[..., first].addcmul_(source[..., second], sin, value=-sign)
    target[..., second].addcmul_(source[..., first], sin, value=sign)
