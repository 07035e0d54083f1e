"""Generation against the full forward pass, and its independence of the batch."""

import dataclasses

import pytest
import torch

from aligner.architecture import GPTArchitecture
from aligner.config import LengthParams, SamplingParams
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.decoding import StopStrings
from aligner.errors import ConfigError, DataError
from aligner.models.gpt.decode.generator import Generator
from aligner.models.gpt.decode.sampling import counter_uniforms, inverse_cdf
from aligner.models.gpt.megatron.build import build_gpt
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

LLAMA = GPTArchitecture(
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=64,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=259,
    max_position_embeddings=96,
    make_vocab_size_divisible_by=64,  # 61 padding columns
)
VARIANTS = {
    "llama": LLAMA,
    "gpt2": dataclasses.replace(
        LLAMA,
        num_query_groups=6,
        activation="gelu",
        normalization="layernorm",
        position_embedding="learned_absolute",
        bias_linear=True,
        bias_qkv=True,
        tie_embeddings=True,
    ),
    "nemotron": dataclasses.replace(
        LLAMA, activation="squared_relu", normalization="layernorm1p", rotary_percent=0.5
    ),
    "qwen2": dataclasses.replace(LLAMA, bias_qkv=True, tie_embeddings=True),
    "qwen3": dataclasses.replace(LLAMA, qk_layernorm=True),
    "mistral": dataclasses.replace(LLAMA, window_size=9),
}
EOS = 2
TOKENIZER = byte_level_tokenizer()


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return make_model(VARIANTS[request.param])


@pytest.fixture(params=["llama", "gpt2", "qwen3"])
def without_short_cut(request, monkeypatch):
    """The same model on megatron-core's own layers."""
    monkeypatch.setattr(
        "aligner.models.gpt.decode.model.incremental_layers", lambda gpt, products: None
    )
    return make_model(VARIANTS[request.param])


@pytest.fixture(params=["packed weights", "values in products"])
def other_way(request, monkeypatch):
    """What larger weights, and other processors, take in place of the tiny model's way."""
    limits = {
        "packed weights": "aligner.kernels.linear_product._CACHED_BYTES",
        "values in products": "aligner.models.gpt.decode.kv_cache._MAX_INT32",
    }
    monkeypatch.setattr(limits[request.param], 0)


@pytest.fixture(scope="module")
def llama():
    return make_model(LLAMA)


def make_model(architecture):
    """Random, with weights large enough that the next token is far from uniform."""
    initialize_parallel()
    gpt = build_gpt(architecture)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in gpt.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data.add_(0.2 * noise)
        else:
            parameter.data.copy_((0.5 if "embedding" in name else 0.25) * noise)
    return gpt, architecture


def make_prompts(batch=9, columns=21, seed=3):
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, LLAMA.vocab_size, (batch, columns), generator=generator)
    lengths = torch.randint(1, columns + 1, (batch,), generator=generator)
    return prompts, lengths


def make_generator(model, *, slots=4, length=None, eos_ids=(EOS,), tokenizer=None, **sampling):
    gpt, architecture = model
    return Generator(
        gpt,
        architecture,
        tokenizer,
        eos_ids=eos_ids,
        pad_id=EOS,
        length=length or LengthParams(max_length=24),
        sampling=SamplingParams(**sampling),
        max_batch_size=slots,
    )


def run(model, prompts, lengths, *, seed=11, ids=None, greedy=None, **options):
    ids = torch.arange(len(prompts)) if ids is None else ids
    return make_generator(model, **options).sample(prompts, lengths, ids, seed, greedy=greedy)


def full_logits(model, tokens):
    """[B, S, V] of the whole sequences, no cache."""
    gpt, architecture = model
    gpt.eval()
    with torch.no_grad():
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits = gpt(tokens, positions, None)
    return logits[:, :, : architecture.vocab_size].float()


def response_mask(output):
    position = torch.arange(output.tokens.shape[1])
    return (position >= output.prompt_lengths[:, None]) & (position < output.lengths[:, None])


@pytest.mark.parametrize("greedy", [True, False])
def test_equals_the_full_forward_pass(variant, greedy):
    check_against_full_forward(variant, greedy)


def test_megatron_layers_equal_the_full_forward_pass(without_short_cut):
    check_against_full_forward(without_short_cut, greedy=False)


@pytest.mark.usefixtures("other_way")
def test_other_ways_equal_the_full_forward_pass(variant):
    check_against_full_forward(variant, greedy=False)


def check_against_full_forward(variant, greedy):
    prompts, lengths = make_prompts()
    output = run(variant, prompts, lengths, greedy=greedy, temperature=1.3)
    logits = full_logits(variant, output.tokens) / 1.3
    mask = response_mask(output)
    expected = logits.log_softmax(-1)[:, :-1].gather(2, output.tokens[:, 1:, None]).squeeze(2)
    difference = torch.where(mask[:, 1:], expected - output.logprobs[:, 1:], 0.0)
    # Each is about 1e-5 away from what float64 gives; logits go up to 16.
    assert difference.abs().max() < 3e-5
    assert (output.logprobs[~mask] == 0).all()

    rows, columns = mask.nonzero(as_tuple=True)
    before = logits[rows, columns - 1]
    if greedy:
        again = before.argmax(-1)
    else:
        again = inverse_cdf(before.softmax(-1), counter_uniforms(11, rows, columns))
    assert torch.equal(output.tokens[rows, columns], again)


def test_the_model_is_left_as_it_was(variant):
    gpt, _ = variant
    before = {name: value.clone() for name, value in gpt.state_dict().items() if value is not None}
    gpt.train()
    prompts, lengths = make_prompts(3)
    run(variant, prompts, lengths)
    assert gpt.training
    assert all(module.training for module in gpt.modules())
    assert not any("forward" in module.__dict__ for module in gpt.modules())
    assert all(getattr(module, "cache", None) is None for module in gpt.modules())
    after = gpt.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    loss = gpt(prompts, torch.arange(21).expand_as(prompts), None).float().logsumexp(-1).sum()
    loss.backward()  # nothing that generation kept stands in the way of gradients
    gpt.zero_grad()


def test_new_weights_are_seen(llama):
    prompts, lengths = make_prompts(3)
    gpt, architecture = make_model(LLAMA)
    generator = make_generator((gpt, architecture))
    first = generator.sample(prompts, lengths, torch.arange(3), 1, greedy=True)
    with torch.no_grad():
        gpt.decoder.layers[0].mlp.linear_fc2.weight.mul_(-2)
    second = generator.sample(prompts, lengths, torch.arange(3), 1, greedy=True)
    assert not torch.equal(first.tokens, second.tokens)


def by_row(output):
    return [
        (tokens[:n].tolist(), logprobs[:n].tolist(), end)
        for tokens, logprobs, n, end in zip(
            output.tokens, output.logprobs, output.lengths, output.is_end.tolist(), strict=True
        )
    ]


def test_results_do_not_depend_on_the_batch(variant):
    check_independence(variant)


@pytest.mark.usefixtures("other_way")
def test_other_ways_do_not_depend_on_the_batch(variant):
    check_independence(variant)


def check_independence(variant):
    """Slots, order, company: the same bits. EOS is likely, so sequences leave and enter."""
    prompts, lengths = make_prompts(12)
    prompts[7] = prompts[4]
    lengths[7] = lengths[4]
    eos = tuple(range(0, 259, 16))
    options = {"eos_ids": eos, "temperature": 1.5}
    reference = by_row(run(variant, prompts, lengths, slots=12, **options))
    assert len({len(tokens) for tokens, _, _ in reference}) > 1
    for slots in (1, 3, 5, 64):
        assert by_row(run(variant, prompts, lengths, slots=slots, **options)) == reference
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = run(variant, prompts[order], lengths[order], ids=order, slots=5, **options)
    assert by_row(shuffled) == [reference[i] for i in order]
    alone = run(variant, prompts[8:9], lengths[8:9], ids=torch.tensor([8]), slots=1, **options)
    assert by_row(alone) == [reference[8]]


def test_samples_of_one_prompt_differ_by_id_and_share_a_prefill(llama, monkeypatch):
    from aligner.models.gpt.decode.model import IncrementalModel

    seen = []
    original = IncrementalModel.prefill

    def counting(self, tokens, *rest):
        seen.append(tokens.shape[0])
        return original(self, tokens, *rest)

    monkeypatch.setattr(IncrementalModel, "prefill", counting)
    prompts, lengths = make_prompts(2)
    prompts, lengths = prompts.repeat_interleave(6, 0), lengths.repeat_interleave(6, 0)
    output = run(llama, prompts, lengths, slots=12, temperature=1.5)
    assert seen == [2]
    responses = {tuple(row) for row, _, _ in by_row(output)}
    assert len(responses) == 12
    # With few slots, prompts that are still in flight are not run again either.
    seen.clear()
    few = run(llama, prompts, lengths, slots=4, temperature=1.5, eos_ids=tuple(range(0, 259, 9)))
    many = run(llama, prompts, lengths, slots=12, temperature=1.5, eos_ids=tuple(range(0, 259, 9)))
    assert by_row(few) == by_row(many)
    same_id = run(llama, prompts[:2], lengths[:2], ids=torch.tensor([5, 5]))
    assert by_row(same_id)[0] == by_row(same_id)[1]


def test_seed_changes_samples_and_not_greedy(llama):
    prompts, lengths = make_prompts(4)
    assert by_row(run(llama, prompts, lengths, seed=1)) != by_row(
        run(llama, prompts, lengths, seed=2)
    )
    assert by_row(run(llama, prompts, lengths, seed=1, greedy=True)) == by_row(
        run(llama, prompts, lengths, seed=2, greedy=True)
    )


def test_lengths_and_ends(llama):
    prompts, lengths = make_prompts()
    eos = tuple(range(0, 259, 8))
    output = run(
        llama,
        prompts,
        lengths,
        eos_ids=eos,
        length=LengthParams(max_length=12, min_length=5),
        temperature=2.0,
    )
    made = output.lengths - lengths
    assert made.min() >= 5
    assert made.max() <= 12
    ended_early = made < 12
    assert ended_early.any()
    assert (output.is_end | ~ended_early).all()
    last = output.tokens[torch.arange(9), output.lengths - 1]
    assert torch.equal(output.is_end, torch.isin(last, torch.tensor(eos)))
    # Before min_length no end token; and none but the last anywhere.
    inside = response_mask(output)
    inside[torch.arange(9), output.lengths - 1] = False
    assert not torch.isin(output.tokens[inside], torch.tensor(eos)).any()


def test_an_end_at_exactly_min_length_is_allowed(llama):
    prompts, lengths = make_prompts(40, 5)
    everything = tuple(range(1, 259))
    output = run(
        llama,
        prompts,
        lengths,
        slots=40,
        eos_ids=everything,
        length=LengthParams(max_length=9, min_length=3),
        temperature=5.0,
    )
    made = output.lengths - lengths
    assert made.min() == 3
    assert output.tokens[0, lengths[0] : lengths[0] + 2].tolist() == [0, 0]


def test_max_length_one(llama):
    prompts, lengths = make_prompts()
    output = run(llama, prompts, lengths, slots=2, length=LengthParams(max_length=1))
    assert torch.equal(output.lengths, lengths + 1)


def test_pad_that_equals_eos_inside_prompts_is_an_ordinary_token(llama):
    """Masks come from lengths: EOS ids in the prompt, and garbage behind it, change nothing."""
    prompts, lengths = make_prompts()
    lengths.clamp_(min=4)
    prompts[:, 1] = EOS
    garbage = prompts.clone()
    behind = torch.arange(21) >= lengths[:, None]
    prompts[behind], garbage[behind] = EOS, 7
    clean = run(llama, prompts, lengths)
    assert by_row(clean) == by_row(run(llama, garbage, lengths))
    after = torch.arange(clean.tokens.shape[1]) >= clean.lengths[:, None]
    assert (clean.tokens[after] == EOS).all()
    logits = full_logits(llama, clean.tokens)
    expected = logits.log_softmax(-1)[:, :-1].gather(2, clean.tokens[:, 1:, None]).squeeze(2)
    mask = response_mask(clean)[:, 1:]
    assert torch.allclose(expected[mask], clean.logprobs[:, 1:][mask], atol=1e-5)


def test_repetition_penalty_equals_a_recomputation(llama):
    prompts, lengths = make_prompts(4)
    output = run(llama, prompts, lengths, repetition_penalty=1.8)
    logits = full_logits(llama, output.tokens)
    for row, column in response_mask(output).nonzero().tolist():
        scores = logits[row, column - 1].clone()
        seen = output.tokens[row, :column].unique()
        scores[seen] = torch.where(scores[seen] > 0, scores[seen] / 1.8, scores[seen] * 1.8)
        expected = scores.log_softmax(-1)[output.tokens[row, column]]
        assert abs(expected - output.logprobs[row, column]) < 1e-5


def encode(text):
    return torch.tensor([TOKENIZER.encode(text)])


def test_stop_strings_end_a_response(llama):
    prompts, lengths = make_prompts(24, 6)
    options = {"tokenizer": TOKENIZER, "temperature": 2.5, "slots": 7}
    free = run(llama, prompts, lengths, **options)
    stop = run(llama, prompts, lengths, end_strings=("e", "Q"), **options)
    stopped = 0
    for row in range(24):
        start = int(lengths[row])
        text_free = free.tokens[row, start : free.lengths[row]].tolist()
        text_stop = stop.tokens[row, start : stop.lengths[row]].tolist()
        targets = {i for i in range(259) if {"e", "Q"} & set(TOKENIZER.decode([i]))}
        first = next((i for i, token in enumerate(text_free) if token in targets), None)
        expected = text_free if first is None else text_free[: first + 1]
        assert text_stop == expected
        stopped += first is not None
        assert bool(stop.is_end[row]) == (first is not None or expected[-1] == EOS)
    assert stopped >= 3


def test_stop_strings_over_several_tokens_and_never_from_the_prompt():
    stop = StopStrings(TOKENIZER, ("\n\n", "end"))
    prompt = TOKENIZER.encode("Q: x\n")
    assert not stop.completed(prompt, TOKENIZER.encode("\n"))
    assert stop.completed(prompt, TOKENIZER.encode("\n\n"))
    assert stop.completed(prompt, TOKENIZER.encode("the end"))
    assert not stop.completed(prompt, TOKENIZER.encode("the ends"))  # completed a token earlier
    assert not stop.completed(prompt, TOKENIZER.encode("the en"))
    assert stop.completed([], TOKENIZER.encode("end"))
    assert not stop.completed(TOKENIZER.encode("e"), TOKENIZER.encode("nd"))
    umlaut = StopStrings(TOKENIZER, ("ü",))
    first, second = TOKENIZER.encode("ü")  # two bytes, two tokens
    assert not umlaut.completed(prompt, [first])
    assert umlaut.completed(prompt, [first, second])


def test_stop_strings_wait_for_min_length(llama):
    prompts, lengths = make_prompts(6)
    every_character = tuple(chr(c) for c in range(32, 127))
    output = run(
        llama,
        prompts,
        lengths,
        tokenizer=TOKENIZER,
        eos_ids=(),
        end_strings=every_character,
        length=LengthParams(max_length=20, min_length=6),
    )
    made = output.lengths - lengths
    assert made.min() >= 6
    assert made.min() < 20


def test_padding_columns_are_never_sampled(llama):
    gpt, architecture = make_model(LLAMA)
    with torch.no_grad():
        gpt.output_layer.weight[architecture.vocab_size :] = 100.0
    prompts, lengths = make_prompts()
    output = run((gpt, architecture), prompts, lengths, temperature=5.0)
    assert output.tokens.max() < architecture.vocab_size
    assert torch.equal(output.tokens, run(llama, prompts, lengths, temperature=5.0).tokens)


def test_bfloat16_stays_near_its_own_full_forward_pass():
    initialize_parallel()
    torch.manual_seed(0)
    model = (
        build_gpt(dataclasses.replace(LLAMA, init_std=0.2), RoleSettings(precision="bf16")),
        LLAMA,
    )
    prompts, lengths = make_prompts()
    output = run(model, prompts, lengths)
    logits = full_logits(model, output.tokens)
    expected = logits.log_softmax(-1)[:, :-1].gather(2, output.tokens[:, 1:, None]).squeeze(2)
    difference = (expected - output.logprobs[:, 1:])[response_mask(output)[:, 1:]]
    assert difference.abs().mean() < 0.05  # bfloat16 carries 8 bits


def test_empty_batch(llama):
    output = run(llama, torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert output.tokens.shape[0] == 0


def test_what_cannot_work_is_refused_before_anything_runs(llama):
    prompts, lengths = make_prompts(3)
    with pytest.raises(ConfigError, match=r"max_length=80.*at most 75"):
        run(llama, prompts, torch.tensor([21, 4, 4]), length=LengthParams(max_length=80))
    with pytest.raises(ConfigError, match="max_length=96"):
        make_generator(llama, length=LengthParams(max_length=96))
    with pytest.raises(ConfigError, match="min_length=9"):
        make_generator(llama, length=LengthParams(max_length=8, min_length=9))
    with pytest.raises(ConfigError, match="end_strings need a tokenizer"):
        make_generator(llama, end_strings=("x",))
    with pytest.raises(ConfigError, match="end-of-sequence ids"):
        make_generator(llama, eos_ids=(259,))
    with pytest.raises(DataError, match="at least 1"):
        run(llama, prompts, torch.tensor([0, 4, 4]))
    with pytest.raises(DataError, match="259"):
        run(llama, prompts + 259, lengths)
