"""Cases of `test_model_utils_tp`: softmax, log-probs, entropy, top-k over a sharded vocabulary."""

import torch
import torch.distributed as dist
from hidden_logprobs import logprobs_of
from model_utils_case import DTYPES, check_fused, filtered, gradient, picked

from aligner.distributed import model_utils as mu


def softmaxes(case):
    logits = case.logits()
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
    logits, tokens, group = (
        case.logits(),
        case.tokens(case.batch, case.length),
        case.layout.tp_group,
    )
    span = (case.start, case.end)
    case.check(
        logits,
        picked(logits, tokens),
        lambda x: mu.DistributedLogprob.apply(x, tokens, *span, group),
        lambda x: mu.ChunkedDistributedLogprob.apply(x, tokens, *span, case.chunk, group),
    )


def padded_columns(case):
    """The last shard ends in padding whose logits would swallow the softmax."""
    real = case.vocab - case.integer(1, case.columns + 2)  # a whole shard may be padding
    logits = case.normal(case.batch, case.length, case.vocab)
    logits[..., real:] = 1e3
    logits.requires_grad_()
    tokens, group = case.tokens(case.batch, case.length) % real, case.layout.tp_group
    span = (case.start, max(case.start, min(case.end, real)))
    case.check(
        logits,
        picked(logits[..., :real], tokens),
        lambda x: mu.ChunkedDistributedLogprob.apply(x, tokens, *span, case.chunk, group),
    )
    values, ids = mu.distributed_vocab_topk(
        *(case.local(logits.detach()).detach(), min(real, 3), group),
        **{"vocab_start_index": span[0], "vocab_end_index": span[1]},
    )
    best = logits.detach()[..., :real].topk(min(real, 3)).values
    torch.testing.assert_close(values.double(), best)
    assert (ids < real).all()
    for sampling in ({"top_k": 2}, {"top_p": 0.7}, {"temperature": 2.0}) if case.length > 1 else ():
        params = mu.TrainingSamplingParams(**sampling)
        case.check(
            logits,
            filtered(logits[:, :-1, :real], tokens[:, 1:], **sampling),
            lambda x, p=params: mu.from_parallel_logits_to_logprobs(
                x, tokens, *span, group, sampling_params=p
            ),
        )


def sampling(case):
    logits, tokens, group = (
        case.logits(),
        case.tokens(case.batch, case.length),
        case.layout.tp_group,
    )
    half = torch.rand(tokens.shape, generator=case.random) < 0.5
    # Inside and outside of the kept set.
    tokens = torch.where(half, logits.detach().argmax(-1), tokens)
    for kept in ((2, 1.0), (None, 0.7), (4, 0.8), (-1, 1.0), (10**6, 0.5)):
        case.check(
            logits,
            filtered(logits, tokens, *kept),
            lambda x, kept=kept: mu.DistributedLogprobWithSampling.apply(x, tokens, group, *kept),
            lambda x, kept=kept: mu.ChunkedDistributedLogprobWithSampling.apply(
                x, tokens, group, *kept, case.chunk
            ),
        )


def gathers(case):
    logits, ids = case.logits(), case.tokens(case.batch, case.length, case.integer(1, 5))
    case.check(  # ids may repeat
        logits,
        logits.log_softmax(-1).gather(-1, ids),
        lambda x: mu.ChunkedDistributedGatherLogprob.apply(
            x, ids, case.start, case.end, case.chunk, case.layout.tp_group
        ),
    )


def entropies(case):
    logits = case.normal(case.batch, case.length, case.vocab)
    logits[..., 0, 1] = -torch.inf  # an excluded token counts 0
    logits.requires_grad_()
    logprob = logits.log_softmax(-1)
    case.check(
        logits,
        (logprob.exp() * logprob.masked_fill(logprob.isneginf(), 0)).sum(-1),
        lambda x: mu.ChunkedDistributedEntropy.apply(x, case.chunk, case.layout.tp_group),
    )


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
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
    ):
        output = mu.ChunkedDistributedHiddenStatesToLogprobs.apply(
            mine, tokens, rows, case.start, case.end, case.chunk, case.layout.tp_group
        )
    assert (case.length * case.batch, 5) in saved
    assert case.layout.tp == 1 or (tokens.numel(), 5) not in saved  # the gathered states
    parts = [whole.chunk(case.layout.tp)[rank] for whole in wanted_grads]
    check_fused(case, output, wanted, (mine, rows), upstream, parts, ranks=1)


def recorded(case):
    """Log-probs and entropies from hidden states, also over the tokens that a sampler kept.

    Against one process; the last shard ends in padding.
    """
    vocab, tokens, group, rank = 299, 14, case.layout.tp_group, case.layout.tp_rank
    rows = 320 // case.layout.tp
    hidden, weight = case.normal(tokens, 8), case.normal(case.layout.tp * rows, 8)
    target = torch.randint(0, vocab, (tokens,), generator=case.random)
    target[:4] = torch.tensor([0, rows - 1, rows, vocab - 1])  # shard edges
    kept = torch.randperm(vocab, generator=case.random)[:40].expand(tokens, -1)
    some = kept.where(torch.arange(tokens)[:, None] % 3 > 0, -1)

    def learned(weight, sampling, group=None):
        """Outputs, and gradients of a weighted sum of them."""
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        outputs = logprobs_of(*inputs, target, vocab, group, with_entropy=True, **sampling)
        factors = torch.arange(1.0, tokens + 1, dtype=torch.float64)
        loss = outputs[0] @ factors - outputs[1] @ factors.flip(0)
        return *(x.detach() for x in outputs), *torch.autograd.grad(loss, inputs)

    top_p = {"top_p": 0.8}
    replayed = [{**top_p, "kept_ids": ids} for ids in (kept, some)]
    for sampling in ({}, {"temperature": 0.7}, {"top_k": 5}, top_p, *replayed):
        *outputs, grad_hidden, grad_weight = learned(
            weight.chunk(case.layout.tp)[rank], sampling, group
        )
        dist.all_reduce(grad_hidden, group=group)  # the caller's copy-to-region
        *wanted, wanted_weight = learned(weight, sampling)
        wanted = (*wanted, wanted_weight.chunk(case.layout.tp)[rank])
        torch.testing.assert_close((*outputs, grad_hidden, grad_weight), wanted)
