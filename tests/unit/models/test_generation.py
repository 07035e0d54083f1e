"""Generation against the full forward pass, and its independence of the batch."""

import dataclasses
import functools
from unittest.mock import Mock

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import nn

from aligner.architecture import GPTArchitecture
from aligner.config import LengthParams, SamplingParams
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.decoding import StopStrings
from aligner.errors import ConfigError, DataError
from aligner.models.gpt.decode.generator import Generator
from aligner.models.gpt.decode.model import IncrementalModel, without_gradients
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


MODULES = "megatron-core's layers"
WAYS = {  # that other models, larger weights and other processors take
    "rows": (),
    "packed weights": ("aligner.kernels.linear_product._CACHED_BYTES", 0),
    "values in products": ("aligner.models.gpt.decode.kv_cache._MAX_INT32", 0),
    MODULES: ("aligner.models.gpt.decode.model.incremental_layers", lambda *_: None),
}
CASES = [
    *((variant, "rows") for variant in VARIANTS),
    *(("gpt2", way) for way in WAYS if way != "rows"),
    *(("mistral", "values in products"), ("qwen2", "packed weights"), ("qwen3", MODULES)),
]


@pytest.fixture(scope="module")
def models():
    return functools.cache(lambda name: make_model(VARIANTS[name]))


@pytest.fixture
def llama(models):
    return models("llama")


@pytest.fixture(params=CASES, ids=", ".join)
def model(request, models, monkeypatch):
    variant, way = request.param
    if WAYS[way]:
        monkeypatch.setattr(*WAYS[way])
    return models(variant)


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


def make_generator(
    model, *, slots=4, length=None, eos_ids=(EOS,), tokenizer=None, record_kept=0, **sampling
):
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
        record_kept=record_kept,
    )


def run(model, prompts, lengths, *, seed=11, ids=None, greedy=None, **options):
    ids = torch.arange(len(prompts)) if ids is None else ids
    return make_generator(model, **options).sample(prompts, lengths, ids, seed, greedy=greedy)


def full_logits(model, tokens):
    """[B, S, V] of the whole sequences, no cache."""
    gpt, architecture = model
    gpt.eval()
    with torch.no_grad():
        logits = gpt(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    return logits[:, :, : architecture.vocab_size].float()


def response_mask(output):
    position = torch.arange(output.tokens.shape[1])
    return (position >= output.prompt_lengths[:, None]) & (position < output.lengths[:, None])


def logprob_differences(output, logits):
    """Of the responses' tokens, from log-probs of full passes."""
    expected = logits.log_softmax(-1)[:, :-1].gather(2, output.tokens[:, 1:, None]).squeeze(2)
    return (expected - output.logprobs[:, 1:])[response_mask(output)[:, 1:]].abs()


@pytest.mark.parametrize("greedy", [True, False])
def test_equals_the_full_forward_pass(model, greedy):
    output = run(model, *make_prompts(), greedy=greedy, temperature=1.3)
    logits, mask = full_logits(model, output.tokens) / 1.3, response_mask(output)
    # Each is about 1e-5 away from what float64 gives; logits go up to 16.
    assert logprob_differences(output, logits).max() < 3e-5
    assert (output.logprobs[~mask] == 0).all()
    rows, columns = mask.nonzero(as_tuple=True)
    before = logits[rows, columns - 1]
    again = inverse_cdf(before.softmax(-1), counter_uniforms(11, rows, columns))
    if greedy:
        again = before.argmax(-1)
    assert torch.equal(output.tokens[rows, columns], again)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_is_left_as_it_was(variant, models):
    gpt, _ = model = models(variant)
    before = {name: value.clone() for name, value in gpt.state_dict().items() if value is not None}
    gpt.train()
    prompts, lengths = make_prompts(3)
    run(model, prompts, lengths)
    assert all(module.training for module in gpt.modules())
    assert not any("forward" in module.__dict__ for module in gpt.modules())
    assert all(getattr(module, "cached", None) is None for module in gpt.modules())
    after = gpt.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    loss = gpt(prompts, torch.arange(21).expand_as(prompts), None).float().logsumexp(-1).sum()
    loss.backward()  # nothing that generation kept stands in the way of gradients
    gpt.zero_grad()


def by_row(output):
    return [
        (tokens[:n].tolist(), logprobs[:n].tolist(), end)
        for tokens, logprobs, n, end in zip(
            output.tokens, output.logprobs, output.lengths, output.is_end.tolist(), strict=True
        )
    ]


def test_results_do_not_depend_on_the_batch(model):
    """Slots, order, company: the same bits. EOS is likely, so sequences leave and enter."""
    prompts, lengths = make_prompts(12)
    prompts[7], lengths[7] = prompts[4], lengths[4]
    options = {"eos_ids": tuple(range(0, 259, 16)), "temperature": 1.5}
    reference = by_row(run(model, prompts, lengths, slots=12, **options))
    assert len({len(tokens) for tokens, _, _ in reference}) > 1
    for slots in (1, 5, 64):
        assert by_row(run(model, prompts, lengths, slots=slots, **options)) == reference
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = run(model, prompts[order], lengths[order], ids=order, slots=5, **options)
    assert by_row(shuffled) == [reference[i] for i in order]
    alone = run(model, prompts[8:9], lengths[8:9], ids=torch.tensor([8]), slots=1, **options)
    assert by_row(alone) == [reference[8]]


def test_samples_of_one_prompt_differ_by_id_and_share_a_prefill(llama, monkeypatch):
    prefill = Mock(wraps=IncrementalModel.prefill)
    monkeypatch.setattr(IncrementalModel, "prefill", lambda *args: prefill(*args))
    prompts, lengths = (each.repeat_interleave(6, 0) for each in make_prompts(2))
    output = run(llama, prompts, lengths, slots=12, temperature=1.5)
    assert [call.args[1].shape[0] for call in prefill.call_args_list] == [2]
    assert len({tuple(row) for row, _, _ in by_row(output)}) == 12
    # With few slots, prompts that are still in flight are not run again either.
    options = {"temperature": 1.5, "eos_ids": tuple(range(0, 259, 9))}
    few, many = (run(llama, prompts, lengths, slots=slots, **options) for slots in (4, 12))
    assert by_row(few) == by_row(many)
    same_id = by_row(run(llama, prompts[:2], lengths[:2], ids=torch.tensor([5, 5])))
    assert same_id[0] == same_id[1]


def test_lengths_and_ends(llama):
    prompts, lengths = make_prompts()
    eos, limits = tuple(range(0, 259, 8)), LengthParams(max_length=12, min_length=5)
    output = run(llama, prompts, lengths, eos_ids=eos, length=limits, temperature=2.0)
    made = output.lengths - lengths
    assert (made.min() >= 5) & (made.max() <= 12)
    ended_early = made < 12
    assert ended_early.any()
    assert (output.is_end | ~ended_early).all()
    last = output.tokens[torch.arange(9), output.lengths - 1]
    assert torch.equal(output.is_end, torch.isin(last, torch.tensor(eos)))
    # Before min_length no end token; and none but the last anywhere.
    inside = response_mask(output)
    inside[torch.arange(9), output.lengths - 1] = False
    assert not torch.isin(output.tokens[inside], torch.tensor(eos)).any()
    one = run(llama, prompts, lengths, slots=2, length=LengthParams(max_length=1))
    assert torch.equal(one.lengths, lengths + 1)
    none = run(llama, torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert none.tokens.shape[0] == 0


def test_an_end_at_exactly_min_length_is_allowed(llama):
    prompts, lengths = make_prompts(40, 5)
    options = {"slots": 40, "eos_ids": tuple(range(1, 259)), "temperature": 5.0}
    limits = LengthParams(max_length=9, min_length=3)
    output = run(llama, prompts, lengths, length=limits, **options)
    assert (output.lengths - lengths).min() == 3
    assert output.tokens[0, lengths[0] : lengths[0] + 2].tolist() == [0, 0]


def test_pad_that_equals_eos_inside_prompts_is_an_ordinary_token(llama):
    """Masks come from lengths: EOS ids in the prompt, and garbage behind it, change nothing."""
    prompts, lengths = make_prompts()
    lengths.clamp_(min=4)
    prompts[:, 1] = EOS
    garbage, behind = prompts.clone(), torch.arange(21) >= lengths[:, None]
    prompts[behind], garbage[behind] = EOS, 7
    clean = run(llama, prompts, lengths)
    assert by_row(clean) == by_row(run(llama, garbage, lengths))
    after = torch.arange(clean.tokens.shape[1]) >= clean.lengths[:, None]
    assert (clean.tokens[after] == EOS).all()
    assert logprob_differences(clean, full_logits(llama, clean.tokens)).max() < 3e-5


def test_repetition_penalty_comes_before_the_temperature(llama):
    prompts, lengths = make_prompts(4)
    output = run(llama, prompts, lengths, repetition_penalty=1.8, temperature=0.7)
    logits = full_logits(llama, output.tokens)
    for row, column in response_mask(output).nonzero().tolist():
        scores = logits[row, column - 1].clone()
        seen = output.tokens[row, :column].unique()
        scores[seen] = torch.where(scores[seen] > 0, scores[seen] / 1.8, scores[seen] * 1.8)
        expected = (scores / 0.7).log_softmax(-1)[output.tokens[row, column]]
        assert abs(expected - output.logprobs[row, column]) < 1e-5


def test_stop_strings_end_a_response(llama):
    prompts, lengths = make_prompts(24, 6)
    options = {"tokenizer": TOKENIZER, "temperature": 2.5, "slots": 7}
    outputs = [run(llama, prompts, lengths, end_strings=ends, **options) for ends in ((), "eQ")]
    targets = {i for i in range(259) if {"e", "Q"} & set(TOKENIZER.decode([i]))}
    stopped = 0
    for row, start in enumerate(lengths.tolist()):
        free, stop = (each.tokens[row, start : each.lengths[row]].tolist() for each in outputs)
        first = next((i for i, token in enumerate(free) if token in targets), None)
        expected = free if first is None else free[: first + 1]
        assert stop == expected
        stopped += first is not None
        assert bool(outputs[1].is_end[row]) == (first is not None or expected[-1] == EOS)
    assert stopped >= 3


def test_stop_strings_over_several_tokens_and_never_from_the_prompt():
    stop, prompt = StopStrings(TOKENIZER, ("\n\n", "end")), TOKENIZER.encode("Q: x\n")
    # "the ends" was completed a token earlier.
    expected = {"\n": False, "\n\n": True, "the end": True, "the ends": False, "the en": False}
    found = {text: stop.completed(prompt, TOKENIZER.encode(text)) for text in expected}
    assert found == expected
    assert stop.completed([], TOKENIZER.encode("end"))
    assert not stop.completed(TOKENIZER.encode("e"), TOKENIZER.encode("nd"))
    umlaut = StopStrings(TOKENIZER, ("ü",))
    first, second = TOKENIZER.encode("ü")  # two bytes, two tokens
    assert not umlaut.completed(prompt, [first])
    assert umlaut.completed(prompt, [first, second])


def test_stop_strings_wait_for_min_length(llama):
    prompts, lengths = make_prompts(6)
    characters = tuple(map(chr, range(32, 127)))
    options = {"tokenizer": TOKENIZER, "eos_ids": (), "end_strings": characters}
    limits = LengthParams(max_length=20, min_length=6)
    made = run(llama, prompts, lengths, length=limits, **options).lengths - lengths
    assert 6 <= made.min() < 20


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
    wide = dataclasses.replace(LLAMA, init_std=0.2)
    model = build_gpt(wide, RoleSettings(precision="bf16")), LLAMA
    output = run(model, *make_prompts())
    differences = logprob_differences(output, full_logits(model, output.tokens))
    assert differences.mean() < 0.05  # bfloat16 carries 8 bits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": LengthParams(max_length=80)}, r"max_length=80.*at most 75"),
        ({"length": LengthParams(max_length=96)}, "max_length=96"),
        ({"length": LengthParams(max_length=8, min_length=9)}, "min_length=9"),
        ({"end_strings": ("x",)}, "end_strings need a tokenizer"),
        ({"eos_ids": (259,)}, "end-of-sequence ids"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(options, message, llama):
    with pytest.raises(ConfigError, match=message):
        run(llama, make_prompts(3)[0], torch.tensor([21, 4, 4]), **options)


def test_prompts_that_are_no_prompts_are_refused(llama):
    prompts, lengths = make_prompts(3)
    with pytest.raises(DataError, match="at least 1"):
        run(llama, prompts, torch.tensor([0, 4, 4]))
    with pytest.raises(DataError, match="259"):
        run(llama, prompts + 259, lengths)


class Fused(nn.Module):
    """Parameters as Transformer Engine keeps them; an empty tensor stands for no bias."""

    def __init__(self, linear, norm=None):
        super().__init__()
        self.weight = linear.weight
        self.bias = torch.empty(0) if linear.bias is None else linear.bias
        if norm is not None:
            self.layer_norm_weight, self.layer_norm_bias = norm.weight, norm.bias
            self.eps, self.zero_centered_gamma = norm.eps, norm.zero_centered
            self.normalization = "RMSNorm" if norm.is_rms else "LayerNorm"


Fused.__module__ = "transformer_engine.pytorch.module.layernorm_linear"


def make_fused_model(architecture):
    gpt, _ = make_model(architecture)
    for layer in gpt.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        attention.linear_qkv = Fused(attention.linear_qkv, layer.input_layernorm)
        attention.linear_proj = Fused(attention.linear_proj)
        mlp.linear_fc1 = Fused(mlp.linear_fc1, layer.pre_mlp_layernorm)
        mlp.linear_fc2 = Fused(mlp.linear_fc2)
        layer.input_layernorm, layer.pre_mlp_layernorm = IdentityOp(), IdentityOp()
    return gpt, architecture


@pytest.mark.parametrize("name", ["llama", "gpt2", "nemotron"])
def test_fused_norms_and_linears_draw_the_same_tokens(name, models):
    expected = run(models(name), *make_prompts())
    found = run(make_fused_model(VARIANTS[name]), *make_prompts())
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=3e-5, rtol=0)


def test_weights_kept_in_8_bits_are_left_to_their_modules():
    """They are no plain parameters; the module itself is called, which `Fused` cannot be."""
    EightBit = type("EightBit", (nn.Parameter,), {})
    model = make_fused_model(LLAMA)
    linear = model[0].decoder.layers[0].mlp.linear_fc2
    linear.weight = EightBit(linear.weight.data)
    with pytest.raises(NotImplementedError):
        run(model, *make_prompts())


def test_inference_mode_where_transformer_engine_is_not_used(llama):
    with without_gradients(llama[0]):
        assert torch.is_inference_mode_enabled()
    with without_gradients(make_fused_model(LLAMA)[0]):
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()


def test_generation_multiplies_no_8_bit_numbers(monkeypatch):
    """Transformer Engine takes multiples of 8 rows; here 4 sequences are in flight, then fewer."""
    monkeypatch.setattr(*WAYS[MODULES])
    gpt, _ = model = make_model(LLAMA)
    gpt.config.fp8, seen = "hybrid", []
    gpt.decoder.register_forward_pre_hook(lambda *_: seen.append(gpt.config.fp8))
    run(model, *make_prompts())
    assert set(seen) == {None}
    assert gpt.config.fp8 == "hybrid"
