"""Packed and context-parallel attention is attention within each sequence, and nothing else.

1. Values and gradients are those of each sequence alone: ragged lengths, grouped queries, windows.
2. A rank's chunks attend over the keys of all ranks by absolute position.
3. What stands next door, and rows that belong to no sequence, change no bit.
4. The runs handed to a GPU's kernel mean the same.
"""

import importlib.machinery
import inspect
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen

from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.models.gpt.layers import varlen
from aligner.models.gpt.layers.attention import SegmentParams
from aligner.models.gpt.layers.segments import build_segments
from aligner.models.gpt.megatron.build import build_gpt
from aligner.parallel.context import holder, local_position
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

HEADS, GROUPS, WIDTH = 6, 2, 8
RAGGED = [1, 40, 7, 8, 33, 64, 2, 41, 100]
EVEN = [8, 40, 16, 64, 4, 100]  # multiples of 4: two ranks, two chunks each
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def core():
    initialize_parallel()
    return build_gpt(TINY_ARCHITECTURE).decoder.layers[0].self_attention.core_attention.eval()


@pytest.fixture(params=[None, 5], ids=["full", "window 5"])
def windowed(core, request, monkeypatch):
    monkeypatch.setattr(core, "window", request.param)
    return core


def qkv(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(rows, 1, heads, WIDTH, generator=generator).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    )


def alone(core, query, key, value, lengths):
    """Each sequence through the plain path."""
    parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    return torch.cat([core(*part) for part in parts])


def packed(core, query, key, value, **segments):
    params = SegmentParams(segments=build_segments(device=CPU, **segments))
    return core(query, key, value, packed_seq_params=params)


@pytest.mark.parametrize("spare", [0, 3])
def test_packed_equals_each_sequence_alone(windowed, spare):
    rows = sum(RAGGED)
    inputs = qkv(rows + spare)
    out = packed(windowed, *inputs, lengths=np.array(RAGGED), num_rows=rows + spare)
    expected = alone(windowed, *(tensor[:rows] for tensor in inputs), RAGGED)
    assert torch.allclose(out[:rows], expected, atol=1e-6)
    assert out[rows:].abs().sum() == 0
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight[:rows]).sum(), inputs)
    for left, right in zip(actual, wanted, strict=True):
        assert torch.allclose(left, right, atol=1e-5)


def test_neighbours_change_no_bit(windowed):
    rows = sum(RAGGED)
    inputs = qkv(rows)
    lengths = np.array(RAGGED)
    before = packed(windowed, *inputs, lengths=lengths, num_rows=rows)
    start, end = sum(RAGGED[:4]), sum(RAGGED[:5])
    others = [tensor.detach().clone() for tensor in qkv(rows, seed=9)]
    for changed, kept in zip(others, inputs, strict=True):
        changed[start:end] = kept[start:end].detach()
    after = packed(windowed, *others, lengths=lengths, num_rows=rows)
    assert torch.equal(before[start:end], after[start:end])
    assert not torch.equal(before[:start], after[:start])


@pytest.mark.parametrize("size", [2, 4])
def test_positions_and_holders_are_inverse(size):
    chunk = np.array([3])
    position = np.arange(3 * 2 * size)
    rank, offset = holder(position, chunk, size)
    assert np.bincount(rank).tolist() == [6] * size
    for number in range(size):
        mine = position[rank == number]
        assert sorted(offset[rank == number]) == list(range(6))
        assert (local_position(offset[rank == number], chunk, number, size) == mine).all()
    assert position[rank == 0].tolist()[:3] == [0, 1, 2]
    assert position[rank == 0].tolist()[-1] == position[-1]  # first and last chunk


def rows_of_rank(lengths, rank, size):
    """Indices of the rows of whole sequences that a rank holds, in its order."""
    rows, start = [], 0
    for length in lengths:
        offset = np.arange(length // size)
        chunk = np.array([length // (2 * size)])
        rows.append(start + local_position(offset, chunk, rank, size))
        start += length
    return torch.from_numpy(np.concatenate(rows))


def test_a_rank_attends_over_all_ranks(windowed):
    lengths, size = np.array(EVEN), 2
    inputs = qkv(sum(EVEN))
    expected = alone(windowed, *inputs, EVEN)
    order = torch.cat([rows_of_rank(EVEN, rank, size) for rank in range(size)])
    query, key, value = (tensor[order] for tensor in inputs)
    local = sum(EVEN) // size
    parts = [
        packed(
            windowed,
            query[rank * local : (rank + 1) * local],
            key,  # as gathered: without a group nothing is sent
            value,
            lengths=lengths,
            num_rows=local,
            cp_rank=rank,
            cp_size=size,
        )
        for rank in range(size)
    ]
    out = torch.cat(parts)
    assert torch.allclose(out, expected[order], atol=1e-6)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected[order] * weight).sum(), inputs)
    for left, right in zip(actual, wanted, strict=True):
        assert torch.allclose(left, right, atol=1e-5)


def kernel(query, key, value, query_ends, key_ends, max_q, max_k, *, scale, window_size):
    """What a GPU's kernel computes: runs aligned at their ends, ``window_size`` keys before."""
    assert max_q == query_ends.diff().max()
    assert max_k == key_ends.diff().max()
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for i in range(len(query_ends) - 1):
        q = query[query_ends[i] : query_ends[i + 1]]
        k = key[key_ends[i] : key_ends[i + 1]].repeat_interleave(groups, 1)
        v = value[key_ends[i] : key_ends[i + 1]].repeat_interleave(groups, 1)
        at = torch.arange(len(q))[:, None] + len(k) - len(q)
        distance = at - torch.arange(len(k))
        seen = distance >= 0
        if window_size[0] >= 0:
            seen &= distance <= window_size[0]
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


# The signatures of the kernels that a GPU may have. Each takes what its release documents, no more.
def torch_2_10(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert is_causal
    assert k.shape[1] == q.shape[1]
    scale = q.shape[-1] ** -0.5
    return kernel(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=(-1, 0))


def torch_2_11(
    q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert k.shape[1] == q.shape[1]
    return kernel(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def torch_2_12(
    q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert enable_gqa
    return kernel(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def flash_attn(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), deterministic=False,
):  # fmt: skip
    assert causal
    return kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale=softmax_scale, window_size=window_size)


@pytest.fixture
def no_flash(monkeypatch):
    find_spec = varlen.importlib.util.find_spec
    monkeypatch.setattr(
        varlen.importlib.util,
        "find_spec",
        lambda name: None if name == "flash_attn" else find_spec(name),
    )


@pytest.fixture
def fresh_choice():
    varlen.find_kernel.cache_clear()
    yield
    varlen.find_kernel.cache_clear()


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("installed", [torch_2_10, torch_2_11, torch_2_12, flash_attn])
def test_runs_for_the_kernel_of_a_gpu(windowed, size, installed, monkeypatch):
    if installed is flash_attn:  # beside a torch without a kernel
        package = types.ModuleType("flash_attn")
        package.flash_attn_varlen_func = flash_attn
        package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setattr(varlen, "torch_kernel", lambda window: None)
    else:
        monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", installed)
    if installed is torch_2_10 and windowed.window is not None:
        assert varlen.torch_kernel(windowed.window) is None
        return
    local = sum(EVEN) // size
    query, key, value = qkv(sum(EVEN) + size)
    for rank in range(size):
        arguments = {
            "lengths": np.array(EVEN),
            "num_rows": local + 1,  # one spare row on every rank
            "cp_rank": rank,
            "cp_size": size,
        }
        expected = packed(windowed, query[: local + 1], key, value, **arguments)
        with monkeypatch.context() as patch:
            patch.setattr("aligner.models.gpt.layers.attention.can_attend_varlen", lambda *_: True)
            out = packed(windowed, query[: local + 1], key, value, **arguments)
        assert torch.allclose(out, expected, atol=1e-6)


@pytest.mark.usefixtures("fresh_choice", "no_flash")
def test_a_torch_without_windows_leaves_them_to_the_buckets(monkeypatch):
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", torch_2_10)
    assert varlen.find_kernel(None) is not None
    assert varlen.find_kernel(4) is None


@pytest.mark.usefixtures("fresh_choice", "no_flash")
def test_the_installed_kernel_takes_what_it_is_given(monkeypatch):
    real = inspect.signature(torch.nn.attention.varlen.varlen_attn)
    bound = []

    def check(*args, **kwargs):
        bound.append(real.bind(*args, **kwargs).arguments)
        return args[0]

    check.__signature__ = real
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", check)
    query, key, ends = torch.ones(4, 6, 8), torch.ones(4, 2, 8), torch.tensor([0, 4])
    windows = (None, 3) if "window_size" in real.parameters else (None,)  # from torch 2.11 on
    for window in windows:
        attend = varlen.find_kernel(window)
        attend(query, key, key, ends, ends, 4, 4, scale=0.5, window=window)
    assert len(bound) == len(windows)


def test_a_pass_without_sequences(core):
    out = packed(core, *qkv(2), lengths=np.empty(0, np.int64), num_rows=2)
    assert out.shape == (2, 1, HEADS * WIDTH)
    assert out.abs().sum() == 0


def test_the_buckets_waste_little():
    lengths = np.random.default_rng(0).lognormal(5, 0.7, 200).astype(np.int64)
    segments = build_segments(lengths, int(lengths.sum()), CPU)
    squares = sum(bucket.sequences * bucket.queries**2 for bucket in segments.buckets)
    assert squares < 1.35 * (lengths**2).sum()
    assert len(segments.buckets) < 25
