"""Attention over a tree of runs is that of each path by itself, in float64.

Values and gradients; windows, grouped queries, context-parallel ranks, and the runs that a GPU's
kernel is given.
"""

import numpy as np
import pytest
import torch

from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.models.gpt.layers import attention
from aligner.models.gpt.layers.attention import SegmentParams
from aligner.models.gpt.layers.segments import build_segments
from aligner.models.gpt.megatron.build import build_gpt
from aligner.parallel.context import local_position
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

# Forks of forks, a sequence that begins another one, equal ones, one by itself.
PARENTS = np.array([-1, 0, 1, 1, 0, 4, 4, 4, -1])
TOKENS = np.array([20, 33, 7, 40, 5, 1, 2, 64, 9])

HEADS, GROUPS, WIDTH = 6, 2, 8


@pytest.fixture(scope="module")
def core():
    initialize_parallel()
    return build_gpt(TINY_ARCHITECTURE).decoder.layers[0].self_attention.core_attention.eval()


@pytest.fixture(params=[None, 30], ids=["full", "window 30"])
def windowed(core, request, monkeypatch):
    monkeypatch.setattr(core, "window", request.param)
    return core


def qkv(rows):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(rows, heads, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    )


def path_of(run):
    """Rows of the tokens up to the end of a run, where runs stand one after the other."""
    starts = np.cumsum(TOKENS) - TOKENS
    path = np.arange(starts[run], starts[run] + TOKENS[run])
    return path if PARENTS[run] < 0 else np.concatenate([path_of(PARENTS[run]), path])


def written_out(query, key, value, window):
    """Every run by the formula: its queries against all keys of its path."""
    outputs = []
    for run, tokens in enumerate(TOKENS):
        path = torch.from_numpy(path_of(run))
        q = query[path[-tokens:]]
        k, v = (each[path].repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
        distance = torch.arange(len(path))[-tokens:, None] - torch.arange(len(path))
        seen = (distance >= 0) & (distance < (window or len(path)))
        scores = torch.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def attended(core, query, key, value, padded, num_rows, **context):
    segments = build_segments(
        padded, num_rows, torch.device("cpu"), parents=PARENTS, tokens=TOKENS, **context
    )
    out = core(query[:, None], key[:, None], value[:, None],
               packed_seq_params=SegmentParams(segments=segments))  # fmt: skip
    return out[:, 0].unflatten(-1, (HEADS, WIDTH))


def test_attention_over_a_tree_is_that_of_each_path(windowed, monkeypatch):
    monkeypatch.setattr(windowed, "scale", WIDTH**-0.5)
    rows = int(TOKENS.sum())
    inputs = qkv(rows + 2)
    out = attended(windowed, *inputs, TOKENS, rows + 2)
    expected = written_out(*(each[:rows] for each in inputs), windowed.window)
    assert (out[:rows] - expected).abs().max() < 1e-7  # its exponential is not to the last bit
    assert out[rows:].abs().sum() == 0
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    actual = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight[:rows]).sum(), inputs)
    for left, right in zip(actual, wanted, strict=True):
        assert (left - right).abs().max() < 1e-6


def test_a_tree_s_keys_and_values_are_kept_once(core, monkeypatch):
    """Not for every path and not for every head: beside them a query, an output and a sum each."""
    monkeypatch.setattr(core, "window", None)
    rows, kept = int(TOKENS.sum()), {}

    def note(tensor):
        if tensor.is_floating_point():
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage  # held, so that no other comes to stand there
        return tensor

    inputs = qkv(rows)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attended(core, *inputs, TOKENS, rows)
    sizes = sorted(storage.nbytes() for storage in kept.values())
    keys = rows * GROUPS * WIDTH * 8
    assert sizes.count(keys) == 2
    segments = build_segments(TOKENS, rows, torch.device("cpu"), parents=PARENTS, tokens=TOKENS)
    slots = sum(bucket.sequences * bucket.queries for bucket in segments.buckets)
    assert sum(sizes) - 2 * keys <= slots * HEADS * (2 * WIDTH + 1) * 8


def shared_out(rank, size):
    """Padded lengths, and the rows of whole runs (-1: padding) that a rank holds, in its order."""
    padded = -(-TOKENS // (2 * size)) * 2 * size
    starts, rows = np.cumsum(TOKENS) - TOKENS, []
    for start, tokens, length in zip(starts, TOKENS, padded, strict=True):
        position = local_position(np.arange(length // size), length // (2 * size), rank, size)
        rows.append(np.where(position < tokens, start + position, -1))
    return padded, np.concatenate(rows)


@pytest.mark.parametrize("varlen", [False, True], ids=["buckets", "runs"])
def test_context_parallel_ranks_hold_parts_of_every_run(windowed, varlen, monkeypatch):
    monkeypatch.setattr(windowed, "scale", WIDTH**-0.5)
    size, inputs = 2, qkv(int(TOKENS.sum()))
    expected = written_out(*inputs, windowed.window)
    held = [shared_out(rank, size)[1] for rank in range(size)]
    gathered = np.concatenate(held)
    query, key, value = (each[torch.from_numpy(gathered.clip(0))] for each in inputs)
    local = len(held[0])
    if varlen:
        monkeypatch.setattr(attention, "can_attend_varlen", lambda *_: True)
        monkeypatch.setattr(attention, "attend_varlen", by_runs)
    for rank in range(size):
        part = slice(rank * local, (rank + 1) * local)
        out = attended(
            windowed, query[part], key, value, shared_out(rank, size)[0], local,
            cp_rank=rank, cp_size=size,
        )  # fmt: skip
        real = held[rank] >= 0
        assert (out[real] - expected[held[rank][real]]).abs().max() < 1e-7


def by_runs(query, key, value, segments, scale, window):
    """What a GPU's kernel computes of the runs: pairs that are aligned at their ends."""
    runs, outputs = segments.runs, []
    for i in range(len(runs.queries)):
        q = query[runs.query_ends[i] : runs.query_ends[i + 1]]
        at = runs.key_rows[runs.key_ends[i] : runs.key_ends[i + 1]]
        k, v = (each[at].repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
        distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        seen = (distance >= 0) & (distance < (window or len(k)))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        outputs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        )
    return torch.cat(outputs)
