"""Choice of the decoder of a transformers model by a test."""

import contextlib
import copy

import torch
from torch import Tensor, nn

from aligner.models.gpt.decode.kv_cache import aligned
from aligner.models.gpt.dtensor.decoding import FullPassDecoder, GroupDecoder, TransformersDecoder
from aligner.models.gpt.dtensor.decoding_slots import SlotDecoder

# Of log-probs in float32. Rounding changes those of 131 small models by at most 2e-4, and a decoder
# that is wrong for a model by at least 2e-2.
_TOLERANCE = 1e-3
_PROMPT_LENGTHS = (9, 5)
_STEPS = 4


def choose_decoder(model: nn.Module) -> type[TransformersDecoder]:
    """Return the fastest decoder whose logits equal those of passes over whole sequences.

    The test decodes short sequences of random tokens in float32. A model of another dtype is copied
    to float32 on its device.
    """
    if next(model.parameters()).dtype != torch.float32:
        model = copy.deepcopy(model).float()
    for decoder in (SlotDecoder, GroupDecoder):
        # A model's code may raise anything for a mask or a cache that it does not support.
        with contextlib.suppress(Exception):
            if decoding_difference(decoder(model, 3, sum(_PROMPT_LENGTHS) + _STEPS)) <= _TOLERANCE:
                return decoder
    return FullPassDecoder


def decoding_difference(decoder: TransformersDecoder) -> float:
    """Return the largest difference of log-probs from passes over whole sequences.

    ``decoder``: of a float32 model, with 3 slots. Two prompts are decoded in them. One of them is
    in two slots. Later its sequences move to other slots, and the prompt begins again.
    """
    model, device = decoder.model, decoder.device
    generator = torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().weight.shape[0]
    prompts = [torch.randint(size, (n,), generator=generator) for n in _PROMPT_LENGTHS]
    tokens = torch.zeros(2, aligned(max(_PROMPT_LENGTHS)), dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    # Sequences, with the logits of the token after each.
    results: list[tuple[Tensor, Tensor]] = []
    with decoder.session():
        logits = decoder.prefill(tokens, _PROMPT_LENGTHS, (0, 1, 2), (0, 1, 0))
        results += zip(prompts, logits, strict=True)
        sequences = [prompts[0], prompts[1], prompts[0]]
        for step in range(_STEPS):
            if step == _STEPS // 2:
                sequences = [sequences[2], sequences[0], prompts[0]]
                decoder.copy(torch.tensor([2, 0]), torch.tensor([0, 1]), len(sequences[0]))
                decoder.copy(torch.tensor([0]), torch.tensor([2]), len(sequences[2]))
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
