"""`model_utils` in one process: random shapes, edges, memory, and the published signatures."""

import inspect

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import zeros
from torch.utils._python_dispatch import TorchDispatchMode

from aligner.distributed import model_utils as mu
from aligner.errors import LayoutError

# Name of a function or class: the parameters of it or of its method `forward`.
PUBLISHED = dict(
    line.split(": ")
    for line in """
_compute_distributed_log_softmax: vocab_parallel_logits group
_compute_distributed_softmax: vocab_parallel_logits group
DistributedLogprob: ctx LOGITS target START_END group inference_only
DistributedCrossEntropy: ctx student_logits target_logits group inference_only
ChunkedDistributedLogprob: ctx LOGITS target START_END chunk_size tp_group inference_only
DistributedLogprobWithSampling: ctx LOGITS target tp_group top_k top_p inference_only
ChunkedDistributedLogprobWithSampling: \
ctx LOGITS target tp_group top_k top_p chunk_size inference_only
ChunkedDistributedGatherLogprob: \
ctx LOGITS global_indices START_END chunk_size tp_group inference_only
ChunkedDistributedEntropy: ctx LOGITS chunk_size tp_group inference_only
ChunkedDistributedHiddenStatesToLogprobs: ctx tensor_parallel_hidden_states target \
output_weight_layer START_END chunk_size tp_group inference_only
AllGatherCPTensor: ctx tensor cp_group seq_dim
allgather_cp_sharded_tensor: tensor cp_group seq_dim
_get_tokens_on_this_cp_rank: input_ids cp_rank cp_size seq_dim
dtensor_from_parallel_logits_to_logprobs: LOGITS target START_END tp_group inference_only \
seq_index chunk_size sampling_params
from_parallel_logits_to_logprobs: LOGITS target START_END tp_group inference_only cp_group \
chunk_size sampling_params
from_parallel_logits_to_logprobs_packed_sequences: LOGITS target cu_seqlens_padded \
unpacked_seqlen START_END group inference_only cp_group chunk_size sampling_params \
target_is_pre_rolled
get_logprobs_from_vocab_parallel_logits: LOGITS input_ids seq_index chunk_size sampling_params
get_next_token_logprobs_from_logits: input_ids next_token_logits seq_index \
vocab_parallel_rank vocab_parallel_group context_parallel_group sampling_params
distributed_vocab_topk: LOGITS k tp_group START_END chunk_size
gather_logits_at_global_indices: LOGITS global_indices tp_group cp_group START_END chunk_size
get_distillation_topk_logprobs_from_logits: student_logits teacher_topk_logits \
teacher_topk_indices zero_outside_topk calculate_entropy vocab_parallel_rank \
vocab_parallel_group context_parallel_group
from_parallel_hidden_states_to_logprobs: tensor_parallel_hidden_states output_weight_layer \
output_weight runtime_gather_output target START_END tp_group inference_only cp_group \
chunk_size sampling_params cu_seqlens_padded unpacked_seqlen sequence_parallel
patch_gpt_model_forward_for_linear_ce_fusion: chunk_size
_gpt_forward_with_linear_ce_fusion: self input_ids position_ids attention_mask decoder_input \
labels inference_context packed_seq_params extra_block_kwargs runtime_gather_output \
inference_params loss_mask padding_mask return_logprobs_for_linear_ce_fusion
all_to_all_vp2sq: LOGITS tp_group
all_to_all_sq2vp: seq_parallel_logits tp_group
""".replace("LOGITS", "vocab_parallel_logits")
    .replace("START_END", "vocab_start_index vocab_end_index")
    .strip()
    .splitlines()
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_signature(name):
    published = getattr(mu, name)
    function = published.forward if inspect.isclass(published) else published
    assert list(inspect.signature(function).parameters) == PUBLISHED[name].split()
    assert name in mu.__all__


@pytest.fixture(scope="module", autouse=True)
def group():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def draw(seed, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 3).to(dtype)


def picked(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def tokens_for(seed, vocab, *shape):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


SHAPES = st.tuples(
    st.integers(0, 3),  # batch
    st.integers(0, 9),  # sequence
    st.integers(1, 20),  # vocabulary
    st.integers(1, 12),  # chunk
    st.integers(0, 10**6),  # seed
)


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.booleans())
def test_any_shape(shape, transposed):
    """Empty batches and sequences, one token, contiguous or not."""
    batch, length, vocab, chunk, seed = shape
    full_logits = draw(seed, batch, length, vocab).requires_grad_()
    logits = full_logits
    if transposed:  # megatron-core's [S, B, V]
        logits = full_logits.transpose(0, 1).contiguous().transpose(0, 1)
    tokens = tokens_for(seed, vocab, batch, length)
    world, span = dist.group.WORLD, (0, vocab)
    probability = full_logits.softmax(-1)
    entropy = (probability * full_logits.log_softmax(-1)).sum(-1)
    logprobs = picked(full_logits, tokens)
    for output, expected_values in (
        (mu.DistributedLogprob.apply(logits, tokens, *span, world), logprobs),
        (mu.ChunkedDistributedLogprob.apply(logits, tokens, *span, chunk, world), logprobs),
        (
            mu.ChunkedDistributedLogprobWithSampling.apply(logits, tokens, world, -1, 1.0, chunk),
            logprobs,
        ),
        (mu.ChunkedDistributedEntropy.apply(logits, chunk, world), entropy),
        (mu._compute_distributed_softmax(logits, world), probability),
        (mu._compute_distributed_log_softmax(logits, world), full_logits.log_softmax(-1)),
        (
            mu.from_parallel_logits_to_logprobs(logits, tokens, *span, world, chunk_size=chunk),
            picked(full_logits[:, :-1], tokens[:, 1:]),
        ),
    ):
        torch.testing.assert_close(output, expected_values)
        upstream = draw(seed + 1, *expected_values.shape)
        slopes = (
            torch.autograd.grad(each, full_logits, upstream, retain_graph=True)
            for each in (output, expected_values)
        )
        torch.testing.assert_close(*slopes)


class LargestFloat32(TorchDispatchMode):
    """Most float32 numbers that one operation made; refuses to bring a number to the host."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), "a number was brought to the host"
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.largest = max(self.largest, tensor.numel())
        return output


SAMPLING = [None, {"top_k": 5}, {"top_p": 0.9, "temperature": 0.7}]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_bfloat16_logits_are_never_float32_as_a_whole(group, sampling):
    length, vocab, chunk = 96, 64, 8
    logits = draw(0, 1, length, vocab, dtype=torch.bfloat16).requires_grad_()
    tokens, boundaries = tokens_for(1, vocab, 1, length), torch.tensor([0, 40, 40, length])
    params = sampling and mu.TrainingSamplingParams(**sampling, keep_target=True)
    options = {"chunk_size": chunk, "sampling_params": params}
    with LargestFloat32() as recorder:
        mu.from_parallel_logits_to_logprobs_packed_sequences(
            logits, tokens, boundaries, 64, 0, vocab, group, **options
        ).sum().backward()
        if sampling is None:
            mu.ChunkedDistributedEntropy.apply(logits, chunk, group).sum().backward()
    assert 0 < recorder.largest <= chunk * vocab
    assert logits.grad.dtype == torch.bfloat16


def test_chunks_are_bounded_without_a_chunk_size(group, monkeypatch):
    from aligner.logprobs import output_layer

    monkeypatch.setitem(output_layer._CHUNK_BYTES, "cpu", 4 * 128 * 4)
    logits = draw(0, 1, 96, 128, dtype=torch.bfloat16).requires_grad_()
    target = draw(1, 1, 96, 128, dtype=torch.bfloat16)
    with LargestFloat32() as recorder:
        tokens = tokens_for(1, 64, 1, 96)
        mu.DistributedLogprob.apply(logits, tokens, 0, 128, group).sum().backward()
        mu.DistributedCrossEntropy.apply(logits, target, group).sum().backward()
        mu._compute_distributed_log_softmax(logits, group).sum().backward()
    assert 0 < recorder.largest <= 4 * 128


def test_inference_keeps_nothing_and_extreme_logits_stay_exact(group):
    logits = draw(0, 2, 3, 5).requires_grad_()
    tokens = tokens_for(2, 5, 2, 3)
    output = mu.DistributedLogprob.apply(logits, tokens, 0, 5, group, True)
    assert output.grad_fn.saved_tensors == ()
    logits = torch.tensor([[[1e4, 0.0, -1e4], [0.0, -torch.inf, -(2.0**99)]]], requires_grad=True)
    tokens = torch.tensor([[0, 2]])
    output = mu.DistributedLogprob.apply(logits, tokens, 0, 3, group)
    assert output.tolist() == [[0.0, -(2.0**99)]]
    output.sum().backward()
    assert logits.grad.tolist() == [[[0, 0, 0], [-1, 0, 1]]]
    logits.grad = None
    entropy = mu.ChunkedDistributedEntropy.apply(logits, 1, group)
    assert entropy.tolist() == [[0, 0]]
    entropy.sum().backward()
    assert (logits.grad == 0).all()


def test_tokens_outside_of_what_is_kept(group):
    student = torch.tensor([[[0.0, -torch.inf]]])
    teacher = torch.zeros(1, 1, 2)
    assert mu.DistributedCrossEntropy.apply(student, teacher, group).item() == torch.inf
    assert mu.DistributedCrossEntropy.apply(student, student, group).item() == 0.0
    # Logits 3, 2, 1, 0 and top-k 2: -inf as published, or counted as kept.
    logits = torch.tensor([[[3.0, 2.0, 1.0, 0.0]] * 2], requires_grad=True)
    tokens = torch.tensor([[0, 3]])
    published = mu.DistributedLogprobWithSampling.apply(logits, tokens, group, 2, 1.0)
    assert published[0, 1] == -torch.inf
    params = mu.TrainingSamplingParams(top_k=2, keep_target=True)
    with_target = mu.from_parallel_logits_to_logprobs(
        logits, tokens, 0, 4, group, sampling_params=params
    )
    expected = -torch.tensor([3.0, 2.0, 0.0]).logsumexp(0)
    torch.testing.assert_close(with_target[0, 0], expected)


def test_next_tokens_without_parallelism():
    logits, tokens = draw(0, 3, 5, 11), tokens_for(1, 11, 3, 5)
    for temperature, params in ((1.0, None), (0.5, mu.TrainingSamplingParams(temperature=0.5))):
        output = mu.get_next_token_logprobs_from_logits(tokens, logits, sampling_params=params)
        expected = picked(logits[:, :-1] / temperature, tokens[:, 1:])
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("outside", [True, False])
def test_distillation_without_parallelism(outside):
    """With a group: tests/distributed/test_model_utils_tp.py."""
    logits, teacher = draw(0, 2, 4, 9), draw(1, 2, 4, 3)
    ids = logits.topk(3, dim=-1).indices
    output = mu.get_distillation_topk_logprobs_from_logits(logits, teacher, ids, outside, True)
    logprob = logits.log_softmax(-1)
    student = logprob.gather(-1, ids) if outside else logits.gather(-1, ids).log_softmax(-1)
    expected = (student, teacher.log_softmax(-1), (logprob.exp() * logprob).sum(-1))
    torch.testing.assert_close(output, tuple(each[:, :-1] for each in expected))


def test_what_cannot_work_is_refused_with_the_numbers(group):
    def check(message, function, *args, **kwargs):
        with pytest.raises(LayoutError, match=message):
            function(*args, **kwargs)

    multiple = "6 is not a multiple of 2 x context parallel size 2.* 8"
    check(multiple, mu._get_tokens_on_this_cp_rank, zeros(1, 6), 0, 2)
    check("same shape", mu.DistributedCrossEntropy.apply, zeros(1, 1, 2), zeros(1, 1, 3), group)
    check("two dimensions", mu.all_to_all_vp2sq, zeros(2, 2, 2), group)
    next_tokens = mu.get_next_token_logprobs_from_logits, zeros(1, 2), zeros(1, 2, 3)
    check("vocab_parallel_rank is missing", *next_tokens, vocab_parallel_group=group)
    topk = mu.get_distillation_topk_logprobs_from_logits
    check("at least 1", topk, zeros(1, 2, 3), zeros(1, 2, 0), zeros(1, 2, 0), True, False)
    frames, span = mu.from_parallel_logits_to_logprobs, (0, 3, group)
    check("sequence length 5 exceeds the 2 positions", frames, zeros(1, 2, 3), zeros(1, 5), *span)
    hidden = mu.from_parallel_hidden_states_to_logprobs, zeros(2, 1, 3), None, None, None
    check("no weight", *hidden, zeros(1, 2), *span)
