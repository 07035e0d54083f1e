"""Choice of the way in which a loaded transformers model runs, by tests on its weights.

A way is refused if sequences of a packed row affect each other, or if log-probs differ from single
sequences in transformers' attention. No list of types is used.
"""

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aligner.checkpoint.hf.any_model import body_path
from aligner.errors import CheckpointError, LayoutError
from aligner.models.gpt.dtensor.attention import NAME, register, running
from aligner.models.gpt.dtensor.decoding import TransformersDecoder
from aligner.models.gpt.dtensor.module import Way, model_inputs
from aligner.models.gpt.dtensor.sampled_transformers import choose_decoder
from aligner.models.gpt.forward.token_layout import LayoutRules, build_layout
from aligner.models.gpt.forward.token_logprobs import LogitsForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest difference of float32 log-probs that rounding causes. Known faults cause 0.08 and more.
_ROUNDING = 1e-3
_LENGTHS = (18, 27)  # tokens of the tested sequences, longer than small windows
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
    """Result of the tests: the best way, the form of the logits, and faults of the other ways.

    ``logits`` is None if the logits are no known function of the last hidden state. ``decoder``
    samples from the model, None for a role that does not sample.
    """

    way: Way = "aligner"
    logits: LogitsForm | None = field(default_factory=LogitsForm)
    faults: dict[Way, str] = field(default_factory=dict)
    decoder: type[TransformersDecoder] | None = None

    def in_words(self) -> list[str]:
        """Describe how the model runs, why it does not run in better ways, and its sampling."""
        faults = [f"not {WORDS[way]}: {fault}" for way, fault in self.faults.items()]
        sampled = [] if self.decoder is None else [f"sampled {self.decoder.description}"]
        return [WORDS[self.way], *faults, *sampled]


def keyed_form(config: Any) -> LogitsForm:
    """Return the form of the logits that a configuration of transformers describes."""

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
    """Test a float32 causal language model on the host, in evaluation mode.

    ``samples``: whether the role samples.

    Raises:
        CheckpointError: a token's log-probs depend on later tokens.
    """
    register()
    rows = [_random_tokens(model, length, seed) for seed, length in enumerate(_LENGTHS)]
    alone = [_logprobs(model, [row], "rows") for row in rows]
    # Causality: another last token changes nothing before it.
    changed = rows[0].clone()
    changed[-1] = _random_tokens(model, 1, seed=9)[0]
    before = _logprobs(model, [changed], "rows")[:-1]
    if (difference := _distance(before, alone[0][:-1])) > _ROUNDING:
        raise CheckpointError(
            f"{type(model).__name__} of transformers lets tokens attend to later tokens (another "
            f"last token changes log-probs before it by {difference:.2g}), so that it is not a "
            "causal language model. Set is_decoder in config.json, or give another model"
        )
    # Ways from the best to the one that is always right.
    faults: dict[Way, str] = {}
    way: Way
    ways: tuple[Way, ...] = ("aligner", "transformers")
    original_attention = model.config._attn_implementation
    for way in ways:
        try:
            model.set_attn_implementation(NAME if way == "aligner" else original_attention)
            fault = _fault(model, way, rows, alone)
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
    return ModelForm(way, _proven_form(model, rows[0]), faults, decoder)


def _random_tokens(model: "PreTrainedModel", length: int, seed: int) -> Tensor:
    """Return int64 ``[length]`` without special tokens, which some models treat in another way."""
    config = model.config
    ids = torch.arange(config.vocab_size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = ids[ids != (getattr(config, name, None) or 0)]
    index = torch.randint(len(ids), (length,), generator=torch.Generator().manual_seed(seed))
    return ids[index]


def _logprobs(model: "PreTrainedModel", rows: list[Tensor], way: Way) -> Tensor:
    """Compute log-probs of the tokens after each token, float32 ``[N, V]``, packed if several."""
    lengths = np.array([len(row) for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    layout = build_layout(padded, lengths, LayoutRules(len(rows) > 1, 1, 1))
    with running(layout.segments) as current:
        logits = model(**model_inputs(layout, way)).logits[0]
    if way == "aligner" and current.calls == 0:
        raise LayoutError("the model does not call an attention function that can be replaced")
    return logits.float().log_softmax(-1)


def _distance(first: Tensor, second: Tensor) -> float:
    """Return the largest difference, infinite if one is not finite."""
    difference = (first - second).abs().max().item()
    return difference if difference == difference else float("inf")


def _fault(
    model: "PreTrainedModel", way: Way, rows: list[Tensor], alone: list[Tensor]
) -> str | None:
    """Describe the first difference from sequences alone, ``[n, V]`` each. None if none is."""
    single = _distance(_logprobs(model, rows[:1], way), alone[0])
    if single > _ROUNDING:
        return f"log-probs of one sequence differ by {single:.2g} from the model's own attention"
    for order in ((0, 1), (1, 0)):
        packed = _logprobs(model, [rows[index] for index in order], way)
        difference = _distance(packed, torch.cat([alone[index] for index in order]))
        if difference > _ROUNDING:
            return f"log-probs of packed sequences differ by {difference:.2g} from sequences alone"
    # In bfloat16 rounding hides how kernels sum, so that an unaffected sequence changes by 0. Of
    # experts, whose products have as many rows as tokens, the float32 sums decide.
    changed_rows = [_random_tokens(model, len(rows[0]), seed=7), rows[1]]
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    leaks = []
    for copied in (narrow, model):
        pair = (
            _logprobs(copied, packed_rows, way)[len(rows[0]) :]
            for packed_rows in (rows, changed_rows)
        )
        leaks.append(_distance(*pair))
    if leaks[0] > 0 and leaks[1] > _ROUNDING / 100:
        return f"another sequence in the row changes log-probs by {max(leaks):.2g}"
    return None


def _proven_form(model: "PreTrainedModel", row: Tensor) -> LogitsForm | None:
    """Return the form that gives the model's logits on ``row`` [n] from its last hidden states."""
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
