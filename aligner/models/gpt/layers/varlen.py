"""Attention over packed sequences by a variable-length GPU kernel, from PyTorch or flash-attn.

PyTorch added ``varlen_attn`` in 2.10, scales and windows in 2.11, grouped queries in 2.12. If an
option is missing, the same result is computed without the option where this is exact.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.gpt.layers.segments import Segments, take_rows

# Causal attention of each run of queries over its run of keys (see `Runs`). Arguments: query, key,
# value, query_ends, key_ends (int32 [runs + 1], starting with 0), maximum length of a run of
# queries, of a run of keys, scale=. Result: [rows, heads, D].
VarlenKernel = Callable[..., Tensor]


def torch_kernel(window: int | None) -> VarlenKernel | None:
    """Return PyTorch's kernel, or None if this version does not support ``window``."""
    from torch.nn.attention.varlen import varlen_attn

    supported = inspect.signature(varlen_attn).parameters
    if window is not None and "window_size" not in supported:
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor, *runs: Any, scale: float) -> Tensor:
        # Options of this version of PyTorch, or an equal computation without the option.
        options: dict[str, Any] = {}
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and "enable_gqa" in supported:
            options["enable_gqa"] = True
        elif groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if "scale" in supported:
            options["scale"] = scale
        else:  # the kernel scales by 1 / sqrt(D)
            query = query * (scale * query.shape[-1] ** 0.5)
        if "window_size" in supported:
            options["window_size"] = (-1 if window is None else window - 1, 0)
        else:
            options["is_causal"] = True
        return varlen_attn(query, key, value, *runs, **options)

    return attend


def flash_kernel(window: int | None) -> VarlenKernel | None:
    """Return flash-attn's kernel, or None if the package is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    flash_attn_varlen_func = importlib.import_module("flash_attn").flash_attn_varlen_func

    def attend(query: Tensor, key: Tensor, value: Tensor, *runs: Any, scale: float) -> Tensor:
        return flash_attn_varlen_func(
            query,
            key,
            value,
            *runs,
            softmax_scale=scale,
            causal=True,
            window_size=(-1 if window is None else window - 1, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    return attend


@functools.cache
def find_kernel(window: int | None) -> VarlenKernel | None:
    """Return a kernel for attention with ``window``, or None if neither package has one."""
    return torch_kernel(window) or flash_kernel(window)


def can_attend_varlen(query: Tensor, dropout: float, window: int | None) -> bool:
    """Return whether `attend_varlen` supports this ``query``, float ``[R, heads, D]``."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and dropout == 0.0
        and find_kernel(window) is not None
    )


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int | None
) -> Tensor:
    """Compute attention within each packed sequence, float ``[R, heads, D]``, 0 in padding.

    ``query``: float ``[R, heads, D]``, this rank's rows. ``key``, ``value``: ``[cp_size * R,
    groups, D]``, rows of all context-parallel ranks. ``scale``: factor of the scores.
    """
    kernel = find_kernel(window)
    assert kernel is not None  # checked by can_attend_varlen
    # Rows after the last sequence are padding. Shared prefixes repeat keys.
    runs = segments.runs
    used = int(runs.queries.sum())
    if runs.key_rows is None:
        key, value = key[:used], value[:used]
    else:
        key, value = take_rows(key, runs.key_rows), take_rows(value, runs.key_rows)
    out = kernel(
        query[:used].contiguous(),
        key.contiguous(),
        value.contiguous(),
        runs.query_ends,
        runs.key_ends,
        int(runs.queries.max()),
        int(runs.keys.max()),
        scale=scale,
    )
    return F.pad(out, (0, 0, 0, 0, 0, query.shape[0] - used))
