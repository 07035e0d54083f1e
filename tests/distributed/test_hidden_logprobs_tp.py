"""Two tensor-parallel gloo ranks give the log-probs, entropies and gradients of one process."""

import datetime
import queue
import traceback

import pytest
import torch
import torch.distributed as dist
from hidden_logprobs import logprobs_of
from ranks import FORKSERVER

from aligner.distributed.model_utils import ChunkedDistributedHiddenStatesToLogprobs

RANKS = 2
VOCAB, ROWS, HIDDEN, TOKENS = 299, 160, 8, 14  # 2 x 160 rows, 21 of padding on the second rank
TIMEOUT_S = 60
KEPT = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:40].expand(TOKENS, -1)
SAMPLING = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.8, "kept_ids": KEPT},
    {"top_p": 0.8, "kept_ids": KEPT.where(torch.arange(TOKENS)[:, None] % 3 > 0, -1)},  # not all
]


def _inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(RANKS * ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    target[:4] = torch.tensor([0, ROWS - 1, ROWS, VOCAB - 1])  # shard edges
    return hidden, weight, target


def _run(weight, sampling, group=None):
    """Outputs, and gradients of a weighted sum of them."""
    hidden, _, target = _inputs()
    hidden, weight = hidden.requires_grad_(), weight.clone().requires_grad_()
    outputs = logprobs_of(hidden, weight, target, VOCAB, group, with_entropy=True, **sampling)
    factors = torch.arange(1.0, TOKENS + 1, dtype=torch.float64)
    (outputs[0] @ factors - outputs[1] @ factors.flip(0)).backward()
    return *(x.detach() for x in outputs), hidden.grad, weight.grad


def _fused(rank, group):
    _, weight, _ = _inputs()
    shard = slice(rank * ROWS, (rank + 1) * ROWS)
    for sampling in SAMPLING:
        *outputs, grad_hidden, grad_weight = _run(weight[shard], sampling, group)
        dist.all_reduce(grad_hidden, group=group)  # the caller's copy-to-region
        expected = _run(weight, sampling)
        actual = (*outputs, grad_hidden, grad_weight)
        wanted = (*expected[:3], expected[3][shard])
        torch.testing.assert_close(actual, wanted, msg=lambda m, s=sampling: f"{s}: {m}")


def _published(rank, group):
    """[S, B, H] sharded over the sequence, S = 7 x 2 on two ranks, B = 1."""
    hidden, weight, target = _inputs()
    expected = _run_published_reference(hidden, weight, target)
    start = rank * ROWS
    local = hidden.view(RANKS, TOKENS // RANKS, 1, HIDDEN)[rank].clone().requires_grad_()
    shard = weight[start : start + ROWS].clone().requires_grad_()
    end, shapes = min(start + ROWS, VOCAB), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: shapes.append(tuple(saved.shape)) or saved, lambda saved: saved
    ):
        logprobs = ChunkedDistributedHiddenStatesToLogprobs.apply(
            local, target.unsqueeze(0), shard, start, end, 4, group, False
        )
    assert (TOKENS // RANKS, HIDDEN) in shapes  # not the gathered states
    assert (TOKENS, HIDDEN) not in shapes
    logprobs.square().sum().backward()
    torch.testing.assert_close(logprobs.detach(), expected[0])
    half = TOKENS // RANKS
    torch.testing.assert_close(local.grad[:, 0], expected[1][rank * half : (rank + 1) * half])
    torch.testing.assert_close(shard.grad, expected[2][start : start + ROWS])


def _run_published_reference(hidden, weight, target):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_softmax = (hidden @ weight[:VOCAB].t()).log_softmax(1)
    logprobs = log_softmax.gather(1, target.unsqueeze(1)).t()
    grads = torch.autograd.grad(logprobs.square().sum(), (hidden, weight))
    return logprobs.detach(), *grads


def _worker(rank, meeting, results):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=RANKS,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        for check in (_fused, _published):
            check(rank, dist.group.WORLD)
        dist.destroy_process_group()
        results.put((rank, None))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def test_two_ranks_equal_one_process(tmp_path):
    results, meeting = FORKSERVER.Queue(), tmp_path / "meeting"
    ranks = [FORKSERVER.Process(target=_worker, args=(r, meeting, results)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        for _ in ranks:
            rank, failure = results.get(timeout=2 * TIMEOUT_S)
            assert failure is None, f"rank {rank}: {failure}"
    except queue.Empty:
        pytest.fail(f"no answer within {2 * TIMEOUT_S} s from a rank; alive: {ranks}")
    finally:
        for process in ranks:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
