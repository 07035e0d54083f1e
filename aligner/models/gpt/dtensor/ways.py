"""Choice of how a transformers model runs and decodes, by tests of the loaded model.

A `Way` is refused if packed sequences affect each other, or if log-probs differ from those of
single sequences with transformers' attention. The tests work for any type of model.
"""

import contextlib
import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from aligner.checkpoint.hf.any_model import body_path
from aligner.errors import CheckpointError, LayoutError
from aligner.models.gpt.decode.kv_cache import aligned
from aligner.models.gpt.dtensor.attention import NAME, register, running
from aligner.models.gpt.dtensor.decoding import (
    FullPassDecoder,
    GroupDecoder,
    SlotDecoder,
    TransformersDecoder,
)
from aligner.models.gpt.dtensor.module import Way, model_inputs
from aligner.models.gpt.forward.token_layout import LayoutRules, build_layout
from aligner.models.gpt.forward.token_logprobs import LogitsForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest accepted difference of float32 log-probs. In 131 small models, rounding causes at most
# 2e-4, known faults of packing cause at least 0.08, and wrong decoders at least 0.02.
_ROUNDING = 1e-3
_PROMPT_LENGTHS, _STEPS = (9, 5), 4
_LENGTHS = (18, 27)  # lengths of the tested sequences, longer than small attention windows
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
WORDS: dict[Way, str] = {
    "aligner": "packed, with shared prefixes, by aligner's attention",
    "transformers": "packed, by transformers' attention masks",
    "rows": "one sequence in each row, by transformers' attention",
}


@dataclass(frozen=True)
class ModelForm:
    """How a model runs, the result of `examine`.

    ``way``: how sequences are passed to the decoder. ``logits``: scale and soft cap of the logits,
    None if the logits are another function of the last hidden state. ``faults``: why faster ways
    were refused. ``decoder``: class that samples, None for a role that does not sample.
    """

    way: Way = "aligner"
    logits: LogitsForm | None = field(default_factory=LogitsForm)
    faults: dict[Way, str] = field(default_factory=dict)
    decoder: type[TransformersDecoder] | None = None

    def in_words(self) -> list[str]:
        """Return the way, the refused ways with their faults, and the decoder, as phrases."""
        faults = [f"not {WORDS[way]}: {fault}" for way, fault in self.faults.items()]
        sampled = [] if self.decoder is None else [f"sampled {self.decoder.description}"]
        return [WORDS[self.way], *faults, *sampled]


def keyed_form(config: Any) -> LogitsForm:
    """Read scale and soft cap of the logits from a configuration of transformers."""

    def values_of(names: tuple[str, ...]) -> list[float]:
        return [float(value) for name in names if (value := getattr(config, name, None))]

    scale = 1.0
    for factor in values_of(_MULTIPLIERS):
        scale *= factor
    for divisor in values_of(_DIVISORS):
        scale /= divisor
    return LogitsForm(scale, next(iter(values_of(_CAPS)), None))


@torch.no_grad()
def examine(model: "PreTrainedModel", *, samples: bool) -> ModelForm:
    """Find the fastest `Way` and decoder of a model, by comparing log-probs on the CPU.

    ``model``: a float32 causal language model in evaluation mode. ``samples``: whether the role
    samples, and thus needs a decoder. Raises `CheckpointError` if a token's log-probs depend on
    later tokens.
    """
    register()
    sequences = [_random_tokens(model, length, seed) for seed, length in enumerate(_LENGTHS)]
    expected = [_logprobs(model, [sequence], "rows") for sequence in sequences]
    # Causality: another last token changes nothing before it.
    changed = sequences[0].clone()
    changed[-1] = _random_tokens(model, 1, seed=9)[0]
    before = _logprobs(model, [changed], "rows")[:-1]
    if (difference := _distance(before, expected[0][:-1])) > _ROUNDING:
        raise CheckpointError(
            f"{type(model).__name__} of transformers lets tokens attend to later tokens (a change "
            f"of the last token changes log-probs before it by {difference:.2g}). This is not a "
            "causal language model. Set is_decoder=true in config.json, or use another model"
        )
    # Try the fastest way first. One sequence per row is always right.
    faults: dict[Way, str] = {}
    way: Way
    ways: tuple[Way, ...] = ("aligner", "transformers")
    original_attention = model.config._attn_implementation
    for way in ways:
        try:
            model.set_attn_implementation(NAME if way == "aligner" else original_attention)
            fault = _fault(model, way, sequences, expected)
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), "")
            fault = f"{type(error).__name__}: {reason}"
        finally:
            model.set_attn_implementation(original_attention)
        if fault is None:
            break
        faults[way] = fault
    else:
        way = "rows"
    decoder = choose_decoder(model) if samples else None
    return ModelForm(way, _logits_form(model, sequences[0]), faults, decoder)


def _random_tokens(model: "PreTrainedModel", length: int, seed: int) -> Tensor:
    # Some models treat special tokens differently.
    config = model.config
    ids = torch.arange(config.vocab_size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = ids[ids != (getattr(config, name, None) or 0)]
    index = torch.randint(len(ids), (length,), generator=torch.Generator().manual_seed(seed))
    return ids[index]


def _logprobs(model: "PreTrainedModel", rows: list[Tensor], way: Way) -> Tensor:
    """Compute log-probs after each of N tokens, float32 ``[N, V]``. Several rows are packed."""
    lengths = np.array([len(row) for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    layout = build_layout(padded, lengths, LayoutRules(len(rows) > 1, 1, 1))
    with running(layout.segments) as current:
        logits = model(**model_inputs(layout, way)).logits[0]
    if way == "aligner" and current.calls == 0:
        raise LayoutError("the model does not call transformers' replaceable attention function")
    return logits.float().log_softmax(-1)


def _distance(first: Tensor, second: Tensor) -> float:
    """Return the largest absolute difference, infinity if a value is NaN."""
    difference = (first - second).abs().max().item()
    return difference if difference == difference else float("inf")


def _fault(
    model: "PreTrainedModel", way: Way, sequences: list[Tensor], expected: list[Tensor]
) -> str | None:
    """Describe a fault of ``way``, or return None. ``expected``: log-probs of single sequences."""
    single = _distance(_logprobs(model, sequences[:1], way), expected[0])
    if single > _ROUNDING:
        return f"log-probs of one sequence differ by {single:.2g} from transformers' attention"
    for order in ((0, 1), (1, 0)):
        packed = _logprobs(model, [sequences[index] for index in order], way)
        difference = _distance(packed, torch.cat([expected[index] for index in order]))
        if difference > _ROUNDING:
            return f"log-probs of packed sequences differ by {difference:.2g} from single sequences"
    # Does the other sequence of the row change a sequence? In bfloat16, rounding hides the order of
    # sums, so that the change must be 0. Experts may change it, because the number of tokens for an
    # expert selects its kernel. For them the float32 change decides.
    changed_sequences = [_random_tokens(model, len(sequences[0]), seed=7), sequences[1]]
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    leaks = []
    for copied in (narrow, model):
        pair = (
            _logprobs(copied, both, way)[len(sequences[0]) :]
            for both in (sequences, changed_sequences)
        )
        leaks.append(_distance(*pair))
    if leaks[0] > 0 and leaks[1] > _ROUNDING / 100:
        return f"another sequence in the row changes log-probs by {max(leaks):.2g}"
    return None


def _logits_form(model: "PreTrainedModel", row: Tensor) -> LogitsForm | None:
    """Return scale and cap that turn the output layer's result into the model's logits, if any."""
    inputs = {"input_ids": row[None], "use_cache": False}
    expected = model(**inputs).logits
    hidden = model.get_submodule(body_path(model))(**inputs).last_hidden_state
    plain = model.get_output_embeddings()(hidden)
    for form in (keyed_form(model.config), LogitsForm()):
        logits = plain * form.scale
        if form.cap is not None:
            logits = form.cap * torch.tanh(logits / form.cap)
        if _distance(logits, expected) <= _ROUNDING / 10 * max(1.0, expected.abs().max().item()):
            return form
    return None


def choose_decoder(model: nn.Module) -> type[TransformersDecoder]:
    """Return the fastest decoder whose log-probs equal those of full forward passes.

    The test decodes short random sequences in float32. If the model has another dtype, a float32
    copy on the same device is tested.
    """
    if next(model.parameters()).dtype != torch.float32:
        model = copy.deepcopy(model).float()
    for decoder in (SlotDecoder, GroupDecoder):
        # A model's code may raise anything for a mask or a cache that it does not support.
        with contextlib.suppress(Exception):
            if decoding_difference(decoder(model, 3, sum(_PROMPT_LENGTHS) + _STEPS)) <= _ROUNDING:
                return decoder
    return FullPassDecoder


def decoding_difference(decoder: TransformersDecoder) -> float:
    """Return the largest log-prob difference between a decoder and full forward passes.

    ``decoder``: has 3 slots and a float32 model. Two slots begin with the first of two prompts.
    Halfway, their sequences are copied to slots 0 and 1, and slot 2 restarts from that prompt.
    """
    model, device = decoder.model, decoder.device
    generator = torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().weight.shape[0]
    prompts = [torch.randint(size, (n,), generator=generator) for n in _PROMPT_LENGTHS]
    tokens = torch.zeros(2, aligned(max(_PROMPT_LENGTHS)), dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    # Each sequence, with the logits of the token after its end.
    results: list[tuple[Tensor, Tensor]] = []
    with decoder.session():
        logits = decoder.prefill(tokens, _PROMPT_LENGTHS, slots=(0, 1, 2), sources=(0, 1, 0))
        results += zip(prompts, logits, strict=True)  # one row for each prompt, not for each slot
        sequences = [prompts[0], prompts[1], prompts[0]]
        for step in range(_STEPS):
            if step == _STEPS // 2:
                sequences = [sequences[2], sequences[0], prompts[0]]
                length, slots = len(sequences[0]), torch.arange(3)
                decoder.copy(source=slots[[2, 0]], target=slots[[0, 1]], length=length)
                # Slot 0 begins with the prompt.
                decoder.copy(source=slots[[0]], target=slots[[2]], length=len(prompts[0]))
            new = torch.randint(size, (3,), generator=generator)
            positions = torch.tensor([len(sequence) for sequence in sequences], device=device)
            logits = decoder.decode(new.to(device), positions, int(positions.max()) + 1)
            sequences = [torch.cat((s, t[None])) for s, t in zip(sequences, new, strict=True)]
            results += zip(sequences, logits, strict=True)
    # The model's own attention, for each sequence alone.
    with torch.inference_mode():
        pairs = [
            (logits, model(input_ids=sequence[None].to(device), use_cache=False).logits[0, -1])
            for sequence, logits in results
        ]
    changes = [(x.log_softmax(-1) - y.log_softmax(-1)).abs().max() for x, y in pairs]
    return torch.stack(changes).nan_to_num(nan=torch.inf).max().item()
