"""Packed and context-parallel attention is attention within each sequence, and nothing else."""

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
from aligner.parallel.context import local_position
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

HEADS, GROUPS, WIDTH, SCALE = 6, 2, 8, 0.3
# Lengths and parents of runs.
FORESTS = {
    "ragged": ([1, 40, 7, 8, 33, 64, 2, 41, 100], None),
    # Forks of forks, a sequence that begins another one, equal ones, one by itself.
    "tree": ([20, 33, 7, 40, 5, 1, 2, 64, 9], [-1, 0, 1, 1, 0, 4, 4, 4, -1]),
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def core():
    initialize_parallel()
    core = build_gpt(TINY_ARCHITECTURE).decoder.layers[0].self_attention.core_attention.eval()
    core.scale = SCALE
    return core


@pytest.fixture(params=[None, 5, 30], ids=["full", "window 5", "window 30"])
def windowed(core, request, monkeypatch):
    monkeypatch.setattr(core, "window", request.param)
    return core


@pytest.fixture(params=FORESTS)
def forest(request):
    lengths, parents = FORESTS[request.param]
    return np.array(lengths), None if parents is None else np.array(parents)


def qkv(rows):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(rows, heads, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    )


def by_formula(query, key, value, window, scale=SCALE):
    """A run's queries against keys that are aligned at their end."""
    key, value = (each.repeat_interleave(HEADS // each.shape[1], 1) for each in (key, value))
    distance = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
    seen = (distance >= 0) & (distance < (window or len(key)))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def written_out(query, key, value, forest, window):
    (lengths, parents), paths = forest, []
    for run, end in enumerate(np.cumsum(lengths)):
        path = np.arange(end - lengths[run], end)
        if parents is not None and parents[run] >= 0:
            path = np.concatenate([paths[parents[run]], path])
        paths.append(path)
    return torch.cat(
        [
            by_formula(query[path[-n:]], key[path], value[path], window)
            for path, n in zip(paths, lengths, strict=True)
        ]
    )


def attended(core, query, key, value, forest, num_rows, padded=None, **context):
    lengths, parents = forest
    padded = lengths if padded is None else padded
    tokens = None if parents is None else lengths
    segments = build_segments(padded, num_rows, CPU, parents=parents, tokens=tokens, **context)
    rows = (each[:, None] for each in (query, key, value))
    out = core(*rows, packed_seq_params=SegmentParams(segments=segments))
    return out[:, 0].unflatten(-1, (HEADS, WIDTH))


@pytest.mark.parametrize("spare", [0, 3])
def test_packed_attention_is_that_of_each_path(windowed, forest, spare):
    rows = int(forest[0].sum())
    inputs = qkv(rows + spare)
    out = attended(windowed, *inputs, forest, rows + spare)
    expected = written_out(*(each[:rows] for each in inputs), forest, windowed.window)
    assert (out[:rows] - expected).abs().max() < 1e-7  # its exponential is not to the last bit
    assert out[rows:].abs().sum() == 0
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    actual = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight[:rows]).sum(), inputs)
    torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=0.0)


def test_a_tree_s_keys_and_values_are_kept_once(core, monkeypatch):
    """Not for every path and not for every head: beside them a query, an output and a sum each."""
    monkeypatch.setattr(core, "window", None)
    forest = lengths, parents = tuple(map(np.array, FORESTS["tree"]))
    rows, kept = int(lengths.sum()), {}

    def note(tensor):
        if tensor.is_floating_point():
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage  # held, so that no other comes to stand there
        return tensor

    inputs = qkv(rows)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attended(core, *inputs, forest, rows)
    sizes = sorted(storage.nbytes() for storage in kept.values())
    keys = rows * GROUPS * WIDTH * 8
    assert sizes.count(keys) == 2
    segments = build_segments(lengths, rows, CPU, parents=parents, tokens=lengths)
    slots = sum(bucket.sequences * bucket.queries for bucket in segments.buckets)
    assert sum(sizes) - 2 * keys <= slots * HEADS * (2 * WIDTH + 1) * 8


def rows_of_rank(lengths, rank, size):
    """Padded lengths, and the rows of whole runs (-1: padding) that a rank holds, in its order."""
    padded = -(-lengths // (2 * size)) * 2 * size
    starts, rows = np.cumsum(lengths) - lengths, []
    for start, tokens, length in zip(starts, lengths, padded, strict=True):
        chunk = np.array([length // (2 * size)])
        position = local_position(np.arange(length // size), chunk, rank, size)
        rows.append(np.where(position < tokens, start + position, -1))
    return padded, np.concatenate(rows)


def check_ranks(core, forest, size):
    """Each rank holds a part of every run, and one row more."""
    inputs = qkv(int(forest[0].sum()))
    expected = written_out(*inputs, forest, core.window)
    held = [np.append(rows_of_rank(forest[0], rank, size)[1], -1) for rank in range(size)]
    gathered = torch.from_numpy(np.concatenate(held).clip(0))
    query, key, value = (each[gathered] for each in inputs)  # without a group nothing is sent
    padded, local = rows_of_rank(forest[0], 0, size)[0], len(held[0])
    for rank, rows in enumerate(held):
        part = slice(rank * local, (rank + 1) * local)
        context = {"cp_rank": rank, "cp_size": size}
        out = attended(core, query[part], key, value, forest, local, padded, **context)
        assert (out[rows >= 0] - expected[rows[rows >= 0]]).abs().max() < 1e-6


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_attends_over_all_ranks(windowed, forest, size):
    check_ranks(windowed, forest, size)


def kernel(query, key, value, query_ends, key_ends, max_q, max_k, *, scale, window_size):
    """What a GPU's kernel computes: runs aligned at their ends, ``window_size`` keys before."""
    assert max_q == query_ends.diff().max()
    assert max_k == key_ends.diff().max()
    window = window_size[0] + 1 if window_size[0] >= 0 else None
    queries = query.split(query_ends.diff().tolist())
    keys, values = (each.split(key_ends.diff().tolist()) for each in (key, value))
    runs = zip(queries, keys, values, strict=True)
    return torch.cat([by_formula(*run, window, scale) for run in runs])


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
    monkeypatch.setitem(sys.modules, "flash_attn", None)


@pytest.fixture(autouse=True)
def fresh_choice():
    varlen.find_kernel.cache_clear()
    yield
    varlen.find_kernel.cache_clear()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("installed", [torch_2_10, torch_2_11, torch_2_12, flash_attn])
def test_runs_for_the_kernel_of_a_gpu(core, forest, size, installed, monkeypatch):
    monkeypatch.setattr(core, "window", None if installed is torch_2_10 else 5)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", installed)
    if installed is flash_attn:  # beside a torch without a kernel
        package = types.ModuleType("flash_attn")
        package.flash_attn_varlen_func = flash_attn
        package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setattr(varlen, "torch_kernel", lambda window: None)
    monkeypatch.setattr("aligner.models.gpt.layers.attention.can_attend_varlen", lambda *_: True)
    check_ranks(core, forest, size)


@pytest.mark.usefixtures("no_flash")
def test_a_torch_without_windows_leaves_them_to_the_buckets(monkeypatch):
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", torch_2_10)
    assert varlen.find_kernel(None) is not None
    assert varlen.find_kernel(4) is None


@pytest.mark.usefixtures("no_flash")
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
        attend(query, key, key, ends, ends, 4, 4, scale=0.5)
    assert len(bound) == len(windows)


def test_a_pass_without_sequences(core):
    out = attended(core, *qkv(2), (np.empty(0, np.int64), None), 2)
    assert out.shape == (2, HEADS, WIDTH)
    assert out.abs().sum() == 0


def test_the_buckets_waste_little():
    lengths = np.random.default_rng(0).lognormal(5, 0.7, 200).astype(np.int64)
    segments = build_segments(lengths, int(lengths.sum()), CPU)
    squares = sum(bucket.sequences * bucket.queries**2 for bucket in segments.buckets)
    assert squares < 1.35 * (lengths**2).sum()
    assert len(segments.buckets) < 25
