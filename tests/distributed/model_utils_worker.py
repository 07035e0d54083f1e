"""One rank of `test_model_utils_tp`: every function against the whole vocabulary in float64.

    torchrun --nproc-per-node N model_utils_worker.py OUTPUT TP,CP [TP,CP ...]

All ranks draw the same inputs from seeded generators, so that each can hold its part against the
whole. A case that fails is noted and the others go on; rank 0 writes ``{layout: {case: failure or
None}}``.
"""

import datetime
import json
import sys
import traceback
from pathlib import Path

import torch

torch.set_num_threads(1)

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from aligner.distributed import model_utils as mu

DTYPES = {
    # Inputs are exact in both; what is rounded is arithmetic (and for bfloat16 the gradient, once).
    torch.float64: ({"atol": 1e-9, "rtol": 1e-9}, {"atol": 1e-9, "rtol": 1e-9}),
    torch.float32: ({"atol": 2e-5, "rtol": 2e-5}, {"atol": 1e-5, "rtol": 1e-4}),
    torch.bfloat16: ({"atol": 2e-5, "rtol": 2e-5}, {"atol": 1e-4, "rtol": 2**-8}),
}
SHAPES = 4  # the last of one position


class Layout:
    """This rank's place: tensor parallel ranks are neighbours, context parallel ones stride."""

    def __init__(self, tp, cp):
        self.tp, self.cp = tp, cp
        self.mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
        self.tp_group, self.cp_group = self.mesh.get_group("tp"), self.mesh.get_group("cp")
        self.tp_rank, self.cp_rank = self.tp_group.rank(), self.cp_group.rank()

    def columns(self, whole):
        """This rank's part of the last dimension."""
        return whole.chunk(self.tp, dim=-1)[self.tp_rank]

    def positions(self, length, rank=None):
        """Positions that a context-parallel rank holds of a sequence, by the definition."""
        rank = self.cp_rank if rank is None else rank
        if self.cp == 1:
            return list(range(length))
        size = length // (2 * self.cp)
        assert size * 2 * self.cp == length
        return [chunk * size + i for chunk in (rank, 2 * self.cp - 1 - rank) for i in range(size)]


class Case:
    """Random shapes and inputs, the same on all ranks."""

    def __init__(self, layout, seed, dtype, one_position=False):
        self.layout, self.dtype = layout, dtype
        self.random = torch.Generator().manual_seed(seed)
        self.batch = self.integer(1, 4)
        self.length = 2 * layout.cp * self.integer(1, 5)
        if one_position:
            self.length = 2 * layout.cp if layout.cp > 1 else 1
        self.columns = self.integer(3, 12)  # per rank
        self.vocab = self.columns * layout.tp
        self.start = self.columns * layout.tp_rank
        self.end = self.start + self.columns
        self.chunk = self.integer(1, self.length + 2)  # rarely a divisor

    def integer(self, low, high):
        return int(torch.randint(low, high + 1, (), generator=self.random))

    def normal(self, *shape, scale=3.0):
        values = torch.randn(*shape, generator=self.random, dtype=torch.float64) * scale
        return values.to(self.dtype).double()  # exact in every dtype used

    def upstream(self, *shape):
        return torch.randn(*shape, generator=self.random, dtype=torch.float64).float().double()

    def tokens(self, *shape):
        tokens = torch.randint(0, self.vocab, shape, generator=self.random)
        edges = [edge % self.vocab for edge in range(0, self.vocab + 1, self.columns)]
        edges += [(edge - 1) % self.vocab for edge in edges]  # first and last id of every shard
        flat = tokens.view(-1)
        flat[: len(edges)] = torch.tensor(edges)[: len(flat)]
        return tokens

    def local(self, logits):
        """This rank's columns of [B, S, V], in the dtype under test."""
        return self.layout.columns(logits).to(self.dtype).clone().requires_grad_()

    def part(self, logits):
        """This rank's columns and positions."""
        return self.local(logits[:, self.layout.positions(logits.shape[1])])

    def compare(self, output, wanted, local, wanted_gradient, upstream):
        """Values, and the gradient of one weighted sum of them; ``wanted_gradient`` is whole."""
        forward, backward = DTYPES[self.dtype]
        torch.testing.assert_close(output.double(), wanted.detach(), **forward)
        (gradient,) = torch.autograd.grad(output, local, upstream.to(output.dtype))
        assert gradient.dtype == local.dtype
        torch.testing.assert_close(gradient.double(), wanted_gradient, **backward)


def gradient(output, inputs, upstream):
    return torch.autograd.grad(output, inputs, upstream, retain_graph=True)[0]


# The reference: plain torch on whole float64 tensors --------------------------------------------


def picked(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def filtered(logits, tokens, top_k=None, top_p=1.0, temperature=1.0, keep_target=False):
    """-inf outside the kept set, found row by row by sorting."""
    logits = logits / temperature
    mask = torch.ones(logits.shape, dtype=torch.bool)
    for row, kept, token in zip(
        logits.detach().flatten(0, -2), mask.flatten(0, -2), tokens.flatten(), strict=True
    ):
        order = row.argsort(descending=True)
        order = order[: top_k if top_k and top_k > 0 else None]
        probability = row[order].softmax(0)
        before = probability.cumsum(0) - probability
        order = order[(before < top_p) | (torch.arange(len(order)) == 0)]
        kept[:] = row >= row[order[-1]]  # equal logits stay together
        if keep_target:
            kept[token] = True
    return picked(logits.masked_fill(~mask, -torch.inf), tokens)


def shifted(function, logits, tokens, **sampling):
    return function(logits[:, :-1], tokens[:, 1:], **sampling)


# Tensor parallelism alone -----------------------------------------------------------------------


def softmaxes(case):
    logits = case.normal(case.batch, case.length, case.vocab).requires_grad_()
    for function, plain in (
        (mu._compute_distributed_log_softmax, torch.log_softmax),
        (mu._compute_distributed_softmax, torch.softmax),
    ):
        wanted = plain(logits, -1)
        upstream = case.upstream(*wanted.shape)
        local = case.local(logits.detach())
        output = function(local, case.layout.tp_group)
        assert output.dtype == local.dtype
        rounding = {torch.bfloat16: 2**-8}.get(case.dtype, 2e-5)
        torch.testing.assert_close(
            output.double(), case.layout.columns(wanted.detach()), rtol=rounding, atol=rounding
        )
        if case.dtype == torch.bfloat16:
            upstream = upstream.bfloat16().double()
        (actual,) = torch.autograd.grad(
            output, local, case.layout.columns(upstream).to(output.dtype)
        )
        torch.testing.assert_close(
            actual.double(),
            case.layout.columns(gradient(wanted, logits, upstream)),
            **DTYPES[case.dtype][1],
        )


def logprobs(case):
    logits = case.normal(case.batch, case.length, case.vocab).requires_grad_()
    tokens = case.tokens(case.batch, case.length)
    wanted, upstream = picked(logits, tokens), case.upstream(case.batch, case.length)
    whole = case.layout.columns(gradient(wanted, logits, upstream))
    span = (case.start, case.end)
    for apply in (
        lambda x: mu.DistributedLogprob.apply(x, tokens, *span, case.layout.tp_group),
        lambda x: mu.ChunkedDistributedLogprob.apply(
            x, tokens, *span, case.chunk, case.layout.tp_group
        ),
    ):
        local = case.local(logits.detach())
        case.compare(apply(local), wanted, local, whole, upstream)
    silent = mu.DistributedLogprob.apply(local, tokens, *span, case.layout.tp_group, True)
    torch.testing.assert_close(silent.double(), wanted.detach(), **DTYPES[case.dtype][0])


def padded_columns(case):
    """The last shard ends in padding whose logits would swallow the softmax."""
    real = case.vocab - case.integer(1, case.columns + 2)  # a whole shard may be padding
    logits = case.normal(case.batch, case.length, case.vocab)
    logits[..., real:] = 1e3
    logits.requires_grad_()
    tokens = case.tokens(case.batch, case.length) % real
    wanted, upstream = picked(logits[..., :real], tokens), case.upstream(case.batch, case.length)
    whole = case.layout.columns(gradient(wanted, logits, upstream))
    span = (case.start, max(case.start, min(case.end, real)))
    local = case.local(logits.detach())
    output = mu.ChunkedDistributedLogprob.apply(
        local, tokens, *span, case.chunk, case.layout.tp_group
    )
    case.compare(output, wanted, local, whole, upstream)
    k = min(real, 3)
    values, ids = mu.distributed_vocab_topk(
        local.detach(),
        k,
        case.layout.tp_group,
        vocab_start_index=span[0],
        vocab_end_index=span[1],
    )
    torch.testing.assert_close(values.double(), logits.detach()[..., :real].topk(k).values)
    assert (ids < real).all()
    for sampling in ({"top_k": 2}, {"top_p": 0.7}, {"temperature": 2.0}):
        wanted = shifted(filtered, logits[..., :real], tokens, **sampling)
        if case.length < 2:
            continue
        upstream = case.upstream(case.batch, case.length - 1)
        local = case.local(logits.detach())
        output = mu.from_parallel_logits_to_logprobs(
            local,
            tokens,
            *span,
            case.layout.tp_group,
            sampling_params=mu.TrainingSamplingParams(**sampling),
        )
        whole = case.layout.columns(gradient(wanted, logits, upstream))
        case.compare(output, wanted, local, whole, upstream)


def sampling(case):
    logits = case.normal(case.batch, case.length, case.vocab).requires_grad_()
    tokens = case.tokens(case.batch, case.length)
    best = logits.detach().argmax(-1)
    half = torch.rand(tokens.shape, generator=case.random) < 0.5
    tokens = torch.where(half, best, tokens)  # inside and outside of the kept set
    for top_k, top_p in ((2, 1.0), (None, 0.7), (4, 0.8), (-1, 1.0), (10**6, 0.5)):
        wanted = filtered(logits, tokens, top_k, top_p)
        upstream = case.upstream(case.batch, case.length)
        whole = case.layout.columns(gradient(wanted, logits, upstream))
        group = case.layout.tp_group
        for apply in (
            lambda x, k=top_k, p=top_p, g=group: mu.DistributedLogprobWithSampling.apply(
                x, tokens, g, k, p
            ),
            lambda x, k=top_k, p=top_p, g=group: mu.ChunkedDistributedLogprobWithSampling.apply(
                x, tokens, g, k, p, case.chunk
            ),
        ):
            local = case.local(logits.detach())
            case.compare(apply(local), wanted, local, whole, upstream)


def gathers(case):
    count = case.integer(1, 5)
    logits = case.normal(case.batch, case.length, case.vocab).requires_grad_()
    ids = case.tokens(case.batch, case.length, count)  # may repeat
    wanted = logits.log_softmax(-1).gather(-1, ids)
    upstream = case.upstream(*wanted.shape)
    local = case.local(logits.detach())
    output = mu.ChunkedDistributedGatherLogprob.apply(
        local, ids, case.start, case.end, case.chunk, case.layout.tp_group
    )
    whole = case.layout.columns(gradient(wanted, logits, upstream))
    case.compare(output, wanted, local, whole, upstream)


def entropies(case):
    logits = case.normal(case.batch, case.length, case.vocab)
    logits[..., 0, 1] = -torch.inf  # an excluded token counts 0
    logits.requires_grad_()
    logprob = logits.log_softmax(-1)
    wanted = (logprob.exp() * logprob.masked_fill(logprob.isneginf(), 0)).sum(-1)
    upstream = case.upstream(*wanted.shape)
    local = case.local(logits.detach())
    output = mu.ChunkedDistributedEntropy.apply(local, case.chunk, case.layout.tp_group)
    whole = case.layout.columns(gradient(wanted, logits, upstream))
    case.compare(output, wanted, local, whole, upstream)


def cross_entropies(case):
    student, target = (case.normal(case.batch, case.length, case.vocab) for _ in range(2))
    target[..., 0, 1] = -torch.inf
    student[..., 0, 1] = -torch.inf
    student += 100
    student.requires_grad_()
    logprob = student.log_softmax(-1)
    wanted = -(target.softmax(-1) * logprob.masked_fill(target.isneginf(), 0)).sum(-1)
    upstream = case.upstream(*wanted.shape)
    local, teacher = case.local(student.detach()), case.local(target)
    if case.dtype == torch.bfloat16:  # + 100 was rounded
        student = student.detach().bfloat16().double().requires_grad_()
        logprob = student.log_softmax(-1)
        wanted = -(target.softmax(-1) * logprob.masked_fill(target.isneginf(), 0)).sum(-1)
    output = mu.DistributedCrossEntropy.apply(local, teacher, case.layout.tp_group)
    whole = case.layout.columns(gradient(wanted, student, upstream))
    forward, backward = DTYPES[case.dtype]
    loose = {"atol": max(forward["atol"], 5e-5 * (case.dtype != torch.float64)), "rtol": 1e-5}
    torch.testing.assert_close(output.double(), wanted.detach(), **loose)
    grads = torch.autograd.grad(
        output, (local, teacher), upstream.to(output.dtype), allow_unused=True
    )
    assert grads[1] is None
    torch.testing.assert_close(
        grads[0].double(), whole, rtol=backward["rtol"], atol=max(backward["atol"], 5e-5)
    )


def exchanges(case):
    ranks, rank = case.layout.tp, case.layout.tp_rank
    rows = ranks * case.batch
    logits = case.normal(rows, case.vocab)
    local = case.local(logits)
    mine = mu.all_to_all_vp2sq(local, case.layout.tp_group)
    assert torch.equal(mine.double(), logits.chunk(ranks)[rank])
    assert torch.equal(mu.all_to_all_sq2vp(mine, case.layout.tp_group), local)
    factors = case.normal(rows, case.vocab)
    (back,) = torch.autograd.grad(mine, local, factors.chunk(ranks)[rank].to(mine.dtype))
    assert torch.equal(back.double(), case.layout.columns(factors))
    share = logits.chunk(ranks)[rank].to(case.dtype).requires_grad_()
    there = mu.all_to_all_sq2vp(share, case.layout.tp_group)
    (back,) = torch.autograd.grad(there, share, case.layout.columns(factors).to(there.dtype))
    assert torch.equal(back.double(), factors.chunk(ranks)[rank])


def topk(case):
    logits = case.normal(case.batch, case.length, case.vocab)
    logits = logits + torch.rand(logits.shape, generator=case.random).double() * 1e-6  # no ties
    logits = logits.to(case.dtype)
    local = case.layout.columns(logits).contiguous()
    for k in (1, 3, case.columns + 1, case.vocab + 5):
        values, ids = mu.distributed_vocab_topk(
            local,
            k,
            case.layout.tp_group,
            vocab_start_index=case.start,
            vocab_end_index=case.end,
            chunk_size=case.chunk,
        )
        best = logits.double().topk(min(k, case.vocab))
        torch.testing.assert_close(values.double(), best.values, rtol=0, atol=0)
        assert torch.equal(logits.gather(-1, ids), values.to(logits.dtype))
        assert (ids.sort(-1).values.diff(dim=-1) > 0).all()


def fused(case):
    """[S / TP, B, H] of a sequence of S x TP, already shifted."""
    hidden = case.normal(case.length * case.layout.tp, case.batch, 5, scale=1.0).requires_grad_()
    weight = case.normal(case.vocab, 5, scale=1.0).requires_grad_()
    tokens = case.tokens(case.batch, case.length * case.layout.tp)
    wanted = picked((hidden @ weight.t()).transpose(0, 1), tokens)
    upstream = case.upstream(*wanted.shape)
    wanted_grads = torch.autograd.grad(wanted, (hidden, weight), upstream)
    rank = case.layout.tp_rank
    mine = hidden.detach().chunk(case.layout.tp)[rank].to(case.dtype).clone().requires_grad_()
    rows = weight.detach().chunk(case.layout.tp)[rank].to(case.dtype).clone().requires_grad_()
    output = mu.ChunkedDistributedHiddenStatesToLogprobs.apply(
        mine, tokens, rows, case.start, case.end, case.chunk, case.layout.tp_group
    )
    parts = [whole.chunk(case.layout.tp)[rank] for whole in wanted_grads]
    check_fused(case, output, wanted, (mine, rows), upstream, parts, ranks=1)


def check_fused(case, output, wanted, inputs, upstream, wanted_grads, ranks):
    """Values, and gradients of hidden states and weight, over so many context-parallel ranks."""
    forward, backward = DTYPES[case.dtype]
    torch.testing.assert_close(output.double(), wanted.detach(), **forward)
    grad_hidden, grad_weight = torch.autograd.grad(output, inputs, upstream.to(output.dtype))
    grad_weight = grad_weight.double()
    if ranks > 1:  # each has the part of its own tokens
        dist.all_reduce(grad_weight, group=case.layout.cp_group)
    for actual, whole in zip((grad_hidden, grad_weight), wanted_grads, strict=True):
        # bfloat16: each rank rounds its part before they are added up.
        loose = {"rtol": 2**-5, "atol": 0.2} if case.dtype == torch.bfloat16 else backward
        torch.testing.assert_close(actual.double(), whole * ranks, **loose)


# Tensor and context parallelism -----------------------------------------------------------------
# Every rank computes the same loss from the whole result: gradients count CP times.

SAMPLING = [
    None,
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_p": 0.8, "temperature": 1.3, "keep_target": True},
    {"top_k": 3, "keep_target": True},
]


def reference(logits, tokens, options):
    if not options:
        return picked(logits, tokens)
    return filtered(logits, tokens, **options)


def frames(case):
    layout = case.layout
    logits = case.normal(case.batch, case.length, case.vocab).requires_grad_()
    for cut in (0, 1):  # the targets may be shorter than the padded logits
        tokens = case.tokens(case.batch, case.length - cut)
        if case.length - cut < 1:
            continue
        for options in SAMPLING:
            params = options and mu.TrainingSamplingParams(**options)
            wanted = reference(logits[:, : tokens.shape[1] - 1], tokens[:, 1:], options)
            upstream = case.upstream(*wanted.shape)
            whole = layout.columns(gradient(wanted, logits, upstream))
            mine = whole[:, layout.positions(case.length)] * layout.cp
            local = case.part(logits.detach())
            output = mu.from_parallel_logits_to_logprobs(
                local,
                tokens,
                case.start,
                case.end,
                layout.tp_group,
                cp_group=layout.cp_group,
                chunk_size=case.chunk,
                sampling_params=params,
            )
            assert output.shape == (case.batch, tokens.shape[1] - 1)
            case.compare(output, wanted, local, mine, upstream)
            local = case.part(logits.detach())
            output = mu.get_next_token_logprobs_from_logits(
                tokens,
                local,
                vocab_parallel_rank=layout.tp_rank,
                vocab_parallel_group=layout.tp_group,
                context_parallel_group=layout.cp_group,
                sampling_params=params,
            )
            case.compare(output, wanted, local, mine, upstream)


def pack(case):
    """Boundaries of some sequences, one of them empty, and what this rank holds of them."""
    unit = 2 * case.layout.cp if case.layout.cp > 1 else 1
    lengths = [unit * case.integer(0, 4) for _ in range(3)] + [unit, 0, 2 * unit]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    held = [
        int(start) + position
        for start, length in zip(cu, lengths, strict=False)
        for position in case.layout.positions(length)
    ]
    return cu, lengths, held


def unpacked(values, cu, width, rows):
    """Log-probs [T] of what each position predicts → [n, width - 1], in plain Python."""
    output = []
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        row = list(values[start : max(start, end - 1)])[: width - 1]
        output.append(torch.stack(row + [values.new_zeros(())] * (width - 1 - len(row))))
    assert len(output) == rows
    return torch.stack(output)


def following(tokens, cu):
    """The next token of the same sequence; the first one behind the last."""
    output = tokens.clone()
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        output[start:end] = tokens[start:end].roll(-1)
    return output


def packed(case):
    layout = case.layout
    cu, lengths, held = pack(case)
    total, width = sum(lengths), max(2, max(lengths) + case.integer(-2, 2))
    logits = case.normal(1, total, case.vocab).requires_grad_()
    tokens = case.tokens(1, total)
    after = following(tokens[0], cu)
    for options in SAMPLING:
        wanted = unpacked(reference(logits[0], after, options), cu, width, len(lengths))
        upstream = case.upstream(*wanted.shape)
        whole = layout.columns(gradient(wanted, logits, upstream))[:, held] * layout.cp
        for rolled in (False, True):
            local = case.local(logits.detach()[:, held])
            output = mu.from_parallel_logits_to_logprobs_packed_sequences(
                local,
                after[held].unsqueeze(0) if rolled else tokens,
                cu.int(),
                width,
                case.start,
                case.end,
                layout.tp_group,
                cp_group=layout.cp_group,
                chunk_size=case.chunk if rolled else None,
                sampling_params=options and mu.TrainingSamplingParams(**options),
                target_is_pre_rolled=rolled,
            )
            case.compare(output, wanted, local, whole, upstream)


def hidden_frames(case):
    """The fused path: padded and packed, sharded over the sequence and replicated."""
    layout = case.layout
    length = case.length * layout.tp
    tokens = case.tokens(case.batch, length - 1)
    hidden = case.normal(length, case.batch, 5, scale=1.0).requires_grad_()
    weight = case.normal(case.vocab, 5, scale=1.0).requires_grad_()
    for options in SAMPLING:
        logits = (hidden @ weight.t()).transpose(0, 1)
        wanted = reference(logits[:, : tokens.shape[1] - 1], tokens[:, 1:], options)
        hidden_case(case, hidden, weight, wanted, layout.positions(length), options, tokens)

    cu, lengths, held = pack(case)
    while len(held) % layout.tp:
        cu, lengths, held = pack(case)
    total, width = sum(lengths), max(lengths) + 1
    tokens = case.tokens(1, total)
    hidden = case.normal(total, 1, 5, scale=1.0).requires_grad_()
    after = following(tokens[0], cu)
    for options in SAMPLING:
        logits = (hidden @ weight.t())[:, 0]
        wanted = unpacked(reference(logits, after, options), cu, width, len(lengths))
        packing = {"cu_seqlens_padded": cu, "unpacked_seqlen": width}
        hidden_case(case, hidden, weight, wanted, held, options, tokens, **packing)


def hidden_case(case, hidden, weight, wanted, held, options, tokens, **packing):
    layout, upstream = case.layout, case.upstream(*wanted.shape)
    grad_hidden, grad_weight = torch.autograd.grad(wanted, (hidden, weight), upstream)
    rows = weight.detach().chunk(layout.tp)[layout.tp_rank].to(case.dtype).requires_grad_()
    for sequence_parallel in (True, False):
        mine, wanted_hidden = hidden.detach()[held], grad_hidden[held]
        if sequence_parallel:
            mine = mine.chunk(layout.tp)[layout.tp_rank]
            wanted_hidden = wanted_hidden.chunk(layout.tp)[layout.tp_rank]
        mine = mine.to(case.dtype).clone().requires_grad_()
        output = mu.from_parallel_hidden_states_to_logprobs(
            mine,
            *((rows, None) if sequence_parallel else (None, rows)),
            None,
            tokens,
            case.start,
            case.end,
            layout.tp_group,
            cp_group=layout.cp_group,
            chunk_size=case.chunk,
            sampling_params=options and mu.TrainingSamplingParams(**options),
            sequence_parallel=sequence_parallel,
            **packing,
        )
        weight_part = grad_weight.chunk(layout.tp)[layout.tp_rank]
        check_fused(
            case, output, wanted, (mine, rows), upstream, (wanted_hidden, weight_part), layout.cp
        )


def context(case):
    layout = case.layout
    whole = case.normal(case.batch, case.length, 3)
    held = layout.positions(case.length)
    for dimension in (0, 1, 2, -2):
        tensor = whole.transpose(1, dimension)
        mine = mu._get_tokens_on_this_cp_rank(tensor, layout.cp_rank, layout.cp, dimension)
        assert torch.equal(mine, whole[:, held].transpose(1, dimension))
        mine = mine.to(case.dtype).clone().requires_grad_()
        output = mu.allgather_cp_sharded_tensor(mine, layout.cp_group, seq_dim=dimension)
        assert torch.equal(output.double(), tensor)
        factors = case.normal(*whole.shape)
        given = (factors * (1 + layout.cp_rank)).transpose(1, dimension).to(case.dtype)
        kept = given.clone()
        (back,) = torch.autograd.grad(output, mine, given)
        ranks = sum(range(1, layout.cp + 1))
        rounding = {"rtol": 2**-7, "atol": 2**-6} if case.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(
            back, (factors[:, held] * ranks).transpose(1, dimension).to(case.dtype), **rounding
        )
        assert torch.equal(given, kept)  # the caller's gradient is left alone


def chosen_logits(case):
    layout, count = case.layout, case.integer(1, 4)
    logits = case.normal(case.batch, case.length, case.vocab).requires_grad_()
    for cut in (0, 1):
        ids = case.tokens(case.batch, case.length - cut, count)
        wanted = logits[:, : ids.shape[1]].gather(-1, ids)
        upstream = case.upstream(*wanted.shape)
        whole = layout.columns(gradient(wanted, logits, upstream))
        local = case.part(logits.detach())
        output = mu.gather_logits_at_global_indices(
            local,
            ids,
            layout.tp_group,
            layout.cp_group,
            vocab_start_index=case.start,
            vocab_end_index=case.end,
            chunk_size=case.chunk,
        )
        held = layout.positions(case.length)
        case.compare(output, wanted, local, whole[:, held] * layout.cp, upstream)


def distillation(case):
    layout, count = case.layout, case.integer(1, 4)
    logits = case.normal(case.batch, case.length, case.vocab).requires_grad_()
    teacher = case.normal(case.batch, case.length, count)
    ids = case.tokens(case.batch, case.length, count)
    logprob = logits.log_softmax(-1)
    entropy = (logprob.exp() * logprob).sum(-1)[:, :-1]
    for outside in (True, False):
        student = logprob.gather(-1, ids) if outside else logits.gather(-1, ids).log_softmax(-1)
        student = student[:, :-1]
        upstream, more = case.upstream(*student.shape), case.upstream(*entropy.shape)
        whole = layout.columns(
            torch.autograd.grad((student, entropy), logits, (upstream, more), retain_graph=True)[0]
        )
        local = case.part(logits.detach())
        output = mu.get_distillation_topk_logprobs_from_logits(
            local, teacher, ids, outside, True, layout.tp_rank, layout.tp_group, layout.cp_group
        )
        forward, backward = DTYPES[case.dtype]
        expected = (student.detach(), teacher.log_softmax(-1)[:, :-1], entropy.detach())
        for actual, value in zip(output, expected, strict=True):
            torch.testing.assert_close(actual.double(), value, **forward)
        weighted = (output[0] * upstream).sum() + (output[2] * more).sum()
        (back,) = torch.autograd.grad(weighted, local)
        mine = whole[:, layout.positions(case.length)] * layout.cp
        loose = {"rtol": 2**-6, "atol": 2e-2} if case.dtype == torch.bfloat16 else backward
        torch.testing.assert_close(back.double(), mine, **loose)
        nothing = mu.get_distillation_topk_logprobs_from_logits(
            local, teacher, ids, outside, False, layout.tp_rank, layout.tp_group, layout.cp_group
        )
        assert nothing[2] is None


def dtensors(case):
    layout = case.layout
    vocab = case.vocab - (layout.tp - 1)  # does not divide
    order = [position for r in range(layout.cp) for position in layout.positions(case.length, r)]
    order = torch.tensor(order)
    logits = case.normal(case.batch, case.length, vocab).requires_grad_()
    tokens = case.tokens(case.batch, case.length) % vocab
    mesh, sequence = layout.mesh, layout.cp > 1
    places = [Shard(1) if sequence else Replicate(), Shard(2)]
    for options in SAMPLING:
        wanted = reference(logits[:, :-1], tokens[:, 1:], options)
        upstream = case.upstream(*wanted.shape)
        whole = gradient(wanted, logits, upstream)
        arranged = logits.detach()[:, order].to(case.dtype)
        everywhere = DTensor.from_local(arranged, mesh, [Replicate()] * 2, run_check=False)
        sharded = everywhere.redistribute(placements=places).requires_grad_()
        given = tokens
        if sequence:
            given = DTensor.from_local(
                tokens[:, order], mesh, [Replicate()] * 2, run_check=False
            ).redistribute(placements=[Shard(1), Replicate()])
        output = mu.get_logprobs_from_vocab_parallel_logits(
            sharded,
            given,
            seq_index=order if sequence else None,
            chunk_size=case.chunk,
            sampling_params=options and mu.TrainingSamplingParams(**options),
        )
        forward, backward = DTYPES[case.dtype]
        torch.testing.assert_close(output.double(), wanted.detach(), **forward)
        (back,) = torch.autograd.grad(output, sharded, upstream.to(output.dtype))
        torch.testing.assert_close(back.full_tensor().double(), whole[:, order], **backward)
        other = mu.get_next_token_logprobs_from_logits(
            given,
            sharded,
            seq_index=order if sequence else None,
            sampling_params=options and mu.TrainingSamplingParams(**options),
        )
        assert torch.equal(other, output)


CASES = [
    softmaxes, logprobs, padded_columns, sampling, gathers, entropies, cross_entropies, exchanges,
    topk, fused, frames, packed, hidden_frames, context, chosen_logits, distillation, dtensors,
]  # fmt: skip


def run(layout):
    """Failure or None of each case, of the first rank that has one."""
    outcome = {}
    for function in CASES:
        failure = None
        try:
            for seed in range(SHAPES):
                dtype = list(DTYPES)[seed % len(DTYPES)]
                function(Case(layout, seed, dtype, one_position=seed == 3))
        except Exception:
            failure = f"rank {dist.get_rank()}, seed {seed}, {dtype}: {traceback.format_exc()}"
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        outcome[function.__name__] = next(filter(None, failures), None)
    return outcome


def main():
    output, *layouts = sys.argv[1:]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    outcome = {}
    for layout in layouts:
        tp, cp = (int(size) for size in layout.split(","))
        outcome[layout] = run(Layout(tp, cp))
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
