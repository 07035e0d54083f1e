"""Every function of `model_utils` on gloo ranks equals the whole vocabulary in float64.

Tensor parallel 4, and tensor parallel 2 with context parallel 2; float64, float32 and bfloat16. All
ranks draw the same inputs from seeded generators, so that each can hold its part against the whole.
"""

import datetime
import traceback
from functools import partial

import model_utils_vocab_cases
import pytest
import torch
import torch.distributed as dist
from model_utils_case import (
    DTYPES,
    SAMPLING,
    Case,
    Layout,
    gradient,
    negative_entropy,
    params_of,
    reference,
)
from ranks import on_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard

from aligner.distributed import model_utils as mu

SHAPES = 4  # the last of one position
LAYOUTS = {"tp4": (4, 1), "tp2cp2": (2, 2)}
CASES = [
    *("softmaxes", "logprobs", "padded_columns", "sampling", "entropies"),
    *("cross_entropies", "exchanges", "topk", "fused", "recorded", "frames", "packed"),
    *("hidden_frames", "context", "chosen_logits", "distillation", "dtensors"),
]


def failures(tp, cp):
    """Of each case the failure of the first rank that has one, or None; the others go on."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    layout, outcome = Layout(tp, cp), {}
    for name in CASES:
        function, failure = globals().get(name) or getattr(model_utils_vocab_cases, name), None
        try:
            for seed in range(SHAPES):
                dtype = list(DTYPES)[seed % len(DTYPES)]
                function(Case(layout, seed, dtype, one_position=seed == 3))
        except Exception:
            failure = f"rank {dist.get_rank()}, seed {seed}, {dtype}: {traceback.format_exc()}"
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, failure)
        outcome[name] = next(filter(None, gathered), None)
    return outcome


@pytest.fixture(scope="module", params=["tp2cp2", pytest.param("tp4", marks=pytest.mark.extended)])
def outcome(request):
    """One launch for all cases of a layout."""
    return on_ranks(4, failures, *LAYOUTS[request.param])


@pytest.mark.parametrize("case", CASES)
def test_equals_the_whole_vocabulary(case, outcome):
    failure = outcome[case]
    assert failure is None, failure


def frames(case):
    layout, logits = case.layout, case.logits()
    for cut in (0, 1):  # the targets may be shorter than the padded logits
        tokens = case.tokens(case.batch, case.length - cut)
        for options in SAMPLING if case.length > cut else ():
            params = {"sampling_params": params_of(options)}

            def explicit(x, tokens=tokens, params=params):
                return mu.from_parallel_logits_to_logprobs(
                    *(x, tokens, *case.span, case.group),
                    **{"cp_group": layout.cp_group, "chunk_size": case.chunk, **params},
                )

            def by_rank(x, tokens=tokens, params=params):
                groups = (layout.tp_rank, case.group, layout.cp_group)
                return mu.get_next_token_logprobs_from_logits(tokens, x, None, *groups, **params)

            wanted = reference(logits[:, : tokens.shape[1] - 1], tokens[:, 1:], options)
            held = layout.positions(case.length)
            case.check(logits, wanted, explicit, by_rank, held=held)


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

    def compute(x, options, rolled):
        return mu.from_parallel_logits_to_logprobs_packed_sequences(
            *(x, after[held].unsqueeze(0) if rolled else tokens, cu.int(), width),
            *(*case.span, case.group),
            cp_group=layout.cp_group,
            chunk_size=case.chunk if rolled else None,
            sampling_params=params_of(options),
            target_is_pre_rolled=rolled,
        )

    for options in SAMPLING:
        wanted = unpacked(reference(logits[0], after, options), cu, width, len(lengths))
        functions = [partial(compute, options=options, rolled=rolled) for rolled in (False, True)]
        case.check(logits, wanted, *functions, held=held)


def hidden_frames(case):
    """The fused path: padded and packed, sharded over the sequence and replicated."""
    layout = case.layout
    length = case.length * layout.tp
    tokens = case.tokens(case.batch, length - 1)
    whole = case.hidden(length, case.batch)
    for options in SAMPLING:
        logits = (whole[0] @ whole[1].t()).transpose(0, 1)
        wanted = reference(logits[:, : tokens.shape[1] - 1], tokens[:, 1:], options)
        hidden_case(case, whole, wanted, layout.positions(length), options, tokens)

    cu, lengths, held = pack(case)
    while len(held) % layout.tp:
        cu, lengths, held = pack(case)
    total, width = sum(lengths), max(lengths) + 1
    tokens, whole = case.tokens(1, total), case.hidden(total, 1)
    after = following(tokens[0], cu)
    for options in SAMPLING:
        logits = (whole[0] @ whole[1].t())[:, 0]
        wanted = unpacked(reference(logits, after, options), cu, width, len(lengths))
        packing = {"cu_seqlens_padded": cu, "unpacked_seqlen": width}
        hidden_case(case, whole, wanted, held, options, tokens, **packing)


def hidden_case(case, whole, wanted, held, options, tokens, **packing):
    layout, upstream = case.layout, case.upstream(*wanted.shape)
    grad_hidden, grad_weight = torch.autograd.grad(wanted, whole, upstream)
    rows = case.leaf(layout.rows(whole[1]))
    for is_split in (True, False):
        mine, wanted_hidden = whole[0].detach()[held], grad_hidden[held]
        if is_split:
            mine, wanted_hidden = layout.rows(mine), layout.rows(wanted_hidden)
        mine = case.leaf(mine)
        output = mu.from_parallel_hidden_states_to_logprobs(
            mine,
            *((rows, None) if is_split else (None, rows)),
            *(None, tokens, *case.span, case.group),
            cp_group=layout.cp_group,
            chunk_size=case.chunk,
            sampling_params=params_of(options),
            sequence_parallel=is_split,
            **packing,
        )
        wanted_grads = (wanted_hidden, layout.rows(grad_weight))
        case.check_fused(output, wanted, (mine, rows), upstream, wanted_grads, layout.cp)


def context(case):
    layout = case.layout
    whole = case.normal(case.batch, case.length, 3)
    held = layout.positions(case.length)
    for dimension in (0, 1, 2, -2):
        tensor = whole.transpose(1, dimension)
        mine = mu._get_tokens_on_this_cp_rank(tensor, layout.cp_rank, layout.cp, dimension)
        assert torch.equal(mine, whole[:, held].transpose(1, dimension))
        mine = case.leaf(mine)
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
    layout, logits, count = case.layout, case.logits(), case.integer(1, 4)
    span = {"vocab_start_index": case.span[0], "vocab_end_index": case.span[1]}
    for cut in (0, 1):
        ids = case.tokens(case.batch, case.length - cut, count)
        case.check(
            logits,
            logits[:, : ids.shape[1]].gather(-1, ids),
            lambda x, ids=ids: mu.gather_logits_at_global_indices(
                x, ids, case.group, layout.cp_group, **span, chunk_size=case.chunk
            ),
            held=layout.positions(case.length),
        )


def distillation(case):
    layout, count = case.layout, case.integer(1, 4)
    logits, held = case.logits(), layout.positions(case.length)
    teacher = case.normal(case.batch, case.length, count)
    ids = case.tokens(case.batch, case.length, count)
    logprob, entropy = logits.log_softmax(-1), negative_entropy(logits)[:, :-1]
    groups = (layout.tp_rank, case.group, layout.cp_group)
    for outside in (True, False):
        student = logprob.gather(-1, ids) if outside else logits.gather(-1, ids).log_softmax(-1)
        student = student[:, :-1]
        upstream, more = case.upstream(*student.shape), case.upstream(*entropy.shape)
        whole = layout.columns(gradient((student, entropy), logits, (upstream, more)))
        local = case.local(logits.detach()[:, held])
        compute = partial(
            mu.get_distillation_topk_logprobs_from_logits, local, teacher, ids, outside
        )
        output = compute(True, *groups)
        expected = (student.detach(), teacher.log_softmax(-1)[:, :-1], entropy.detach())
        for actual, value in zip(output, expected, strict=True):
            torch.testing.assert_close(actual.double(), value, **case.forward)
        weighted = (output[0] * upstream).sum() + (output[2] * more).sum()
        (back,) = torch.autograd.grad(weighted, local)
        loose = {"rtol": 2**-6, "atol": 2e-2} if case.dtype == torch.bfloat16 else case.backward
        torch.testing.assert_close(back.double(), whole[:, held] * layout.cp, **loose)
        assert compute(False, *groups)[2] is None


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
        keywords = {"seq_index": order if sequence else None}
        keywords["sampling_params"] = params_of(options)
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
            sharded, given, chunk_size=case.chunk, **keywords
        )
        torch.testing.assert_close(output.double(), wanted.detach(), **case.forward)
        (back,) = torch.autograd.grad(output, sharded, upstream.to(output.dtype))
        torch.testing.assert_close(back.full_tensor().double(), whole[:, order], **case.backward)
        other = mu.get_next_token_logprobs_from_logits(given, sharded, **keywords)
        assert torch.equal(other, output)
