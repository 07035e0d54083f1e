"""Confidence of a measured share."""

import math

_Z95 = 1.959963984540054  # the normal distribution holds 95 % within this many deviations


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """95 % confidence interval of a share of ``count`` independent answers (Wilson, 1927).

    Unlike the normal approximation it stays within 0 and 1 and has a width where ``share`` is
    either.
    """
    if count < 1 or not 0 <= share <= 1:
        raise ValueError(f"a share of {share} of {count} answers")
    squared = _Z95**2 / count
    middle = (share + squared / 2) / (1 + squared)
    half = _Z95 * math.sqrt(share * (1 - share) / count + squared / count / 4) / (1 + squared)
    return max(0.0, middle - half), min(1.0, middle + half)
