"""Cases of `test_model_utils_tp`: softmax, log-probs, entropy, top-k over a sharded vocabulary."""

import torch
import torch.distributed as dist
from hidden_logprobs import logprobs_of
from model_utils_case import filtered, gradient, negative_entropy, params_of, picked

from aligner.distributed import model_utils as mu


def softmaxes(case):
    logits, columns = case.logits(), case.layout.columns
    is_rounded = case.dtype == torch.bfloat16
    rounding = 2**-8 if is_rounded else 2e-5
    for function, plain in (
        (mu._compute_distributed_log_softmax, torch.log_softmax),
        (mu._compute_distributed_softmax, torch.softmax),
    ):
        wanted = plain(logits, -1)
        upstream = case.upstream(*wanted.shape)
        upstream = upstream.bfloat16().double() if is_rounded else upstream
        local = case.local(logits)
        output = function(local, case.group)
        assert output.dtype == local.dtype
        tolerance = {"rtol": rounding, "atol": rounding}
        torch.testing.assert_close(output.double(), columns(wanted.detach()), **tolerance)
        (actual,) = torch.autograd.grad(output, local, columns(upstream).to(output.dtype))
        whole = columns(gradient(wanted, logits, upstream))
        torch.testing.assert_close(actual.double(), whole, **case.backward)


def logprobs(case):
    logits, tokens = case.logits(), case.tokens(case.batch, case.length)
    case.check(
        logits,
        picked(logits, tokens),
        lambda x: mu.DistributedLogprob.apply(x, tokens, *case.span, case.group),
        lambda x: mu.ChunkedDistributedLogprob.apply(x, tokens, *case.span, case.chunk, case.group),
    )
    ids = case.tokens(case.batch, case.length, case.integer(1, 5))
    case.check(  # ids may repeat
        logits,
        logits.log_softmax(-1).gather(-1, ids),
        lambda x: mu.ChunkedDistributedGatherLogprob.apply(
            x, ids, *case.span, case.chunk, case.group
        ),
    )


def padded_columns(case):
    """The last shard ends in padding whose logits would swallow the softmax."""
    real = case.vocab - case.integer(1, case.columns + 2)  # a whole shard may be padding
    logits = case.normal(case.batch, case.length, case.vocab)
    logits[..., real:] = 1e3
    logits.requires_grad_()
    tokens, group = case.tokens(case.batch, case.length) % real, case.group
    start, end = case.span
    span = (start, max(start, min(end, real)))
    case.check(
        logits,
        picked(logits[..., :real], tokens),
        lambda x: mu.ChunkedDistributedLogprob.apply(x, tokens, *span, case.chunk, group),
    )
    values, ids = mu.distributed_vocab_topk(
        *(case.local(logits).detach(), min(real, 3), group),
        **{"vocab_start_index": span[0], "vocab_end_index": span[1]},
    )
    best = logits.detach()[..., :real].topk(min(real, 3)).values
    torch.testing.assert_close(values.double(), best)
    assert (ids < real).all()
    for options in ({"top_k": 2}, {"top_p": 0.7}, {"temperature": 2.0}) if case.length > 1 else ():
        params = {"sampling_params": params_of(options)}
        case.check(
            logits,
            filtered(logits[:, :-1, :real], tokens[:, 1:], **options),
            lambda x, params=params: mu.from_parallel_logits_to_logprobs(
                x, tokens, *span, group, **params
            ),
        )


def sampling(case):
    logits, tokens, group = case.logits(), case.tokens(case.batch, case.length), case.group
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


def entropies(case):
    logits = case.normal(case.batch, case.length, case.vocab)
    logits[..., 0, 1] = -torch.inf
    logits.requires_grad_()
    case.check(
        logits,
        negative_entropy(logits),
        lambda x: mu.ChunkedDistributedEntropy.apply(x, case.chunk, case.group),
    )


def cross_entropies(case):
    student, target = (case.normal(case.batch, case.length, case.vocab) for _ in range(2))
    for logits in (student, target):
        logits[..., 0, 1] = -torch.inf
    student = (student + 100).to(case.dtype).double().requires_grad_()  # bfloat16 rounds + 100
    logprob = student.log_softmax(-1)
    wanted = -(target.softmax(-1) * logprob.masked_fill(target.isneginf(), 0)).sum(-1)
    upstream = case.upstream(*wanted.shape)
    local, teacher = case.local(student), case.local(target)
    output = mu.DistributedCrossEntropy.apply(local, teacher, case.group)
    whole = case.layout.columns(gradient(wanted, student, upstream))
    loose = {"atol": 1e-9 if case.dtype == torch.float64 else 5e-5, "rtol": 1e-5}
    torch.testing.assert_close(output.double(), wanted.detach(), **loose)
    mine, none = torch.autograd.grad(
        output, (local, teacher), upstream.to(output.dtype), allow_unused=True
    )
    assert none is None
    loose = {**case.backward, "atol": max(case.backward["atol"], 5e-5)}
    torch.testing.assert_close(mine.double(), whole, **loose)


def exchanges(case):
    mine, columns, group = case.layout.rows, case.layout.columns, case.group
    rows = case.layout.tp * case.batch
    logits, factors = case.normal(rows, case.vocab), case.normal(rows, case.vocab)
    local = case.local(logits)
    there = mu.all_to_all_vp2sq(local, group)
    assert torch.equal(there.double(), mine(logits))
    assert torch.equal(mu.all_to_all_sq2vp(there, group), local)
    (back,) = torch.autograd.grad(there, local, mine(factors).to(there.dtype))
    assert torch.equal(back.double(), columns(factors))
    share = case.leaf(mine(logits))
    there = mu.all_to_all_sq2vp(share, group)
    (back,) = torch.autograd.grad(there, share, columns(factors).to(there.dtype))
    assert torch.equal(back.double(), mine(factors))


def topk(case):
    logits = case.normal(case.batch, case.length, case.vocab)
    logits = logits + torch.rand(logits.shape, generator=case.random).double() * 1e-6  # no ties
    logits, (start, end) = logits.to(case.dtype), case.span
    local = case.layout.columns(logits).contiguous()
    for k in (1, 3, case.columns + 1, case.vocab + 5):
        values, ids = mu.distributed_vocab_topk(
            *(local, k, case.group),
            **{"vocab_start_index": start, "vocab_end_index": end, "chunk_size": case.chunk},
        )
        best = logits.double().topk(min(k, case.vocab))
        torch.testing.assert_close(values.double(), best.values, rtol=0, atol=0)
        assert torch.equal(logits.gather(-1, ids), values.to(logits.dtype))
        assert (ids.sort(-1).values.diff(dim=-1) > 0).all()


def fused(case):
    """[S / TP, B, H] of a sequence of S x TP, already shifted."""
    layout, length = case.layout, case.length * case.layout.tp
    hidden, weight = case.hidden(length, case.batch)
    tokens = case.tokens(case.batch, length)
    wanted = picked((hidden @ weight.t()).transpose(0, 1), tokens)
    upstream = case.upstream(*wanted.shape)
    wanted_grads = torch.autograd.grad(wanted, (hidden, weight), upstream)
    inputs = [case.leaf(layout.rows(whole)) for whole in (hidden, weight)]
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
    ):
        output = mu.ChunkedDistributedHiddenStatesToLogprobs.apply(
            inputs[0], tokens, inputs[1], *case.span, case.chunk, case.group
        )
    assert (case.length * case.batch, 5) in saved
    assert layout.tp == 1 or (tokens.numel(), 5) not in saved  # the gathered states
    case.check_fused(output, wanted, inputs, upstream, map(layout.rows, wanted_grads))


def recorded(case):
    """Log-probs and entropies from hidden states, also over the tokens that a sampler kept.

    Against one process; the last shard ends in padding.
    """
    vocab, tokens, mine = 299, 14, case.layout.rows
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
        *outputs, grad_hidden, grad_weight = learned(mine(weight), sampling, case.group)
        dist.all_reduce(grad_hidden, group=case.group)  # the caller's copy-to-region
        *wanted, wanted_weight = learned(weight, sampling)
        found = (*outputs, grad_hidden, grad_weight)
        torch.testing.assert_close(found, (*wanted, mine(wanted_weight)))
