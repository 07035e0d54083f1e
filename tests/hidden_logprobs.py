"""Log-probs from hidden states, and their reference, by sampling options in keywords."""

import math

import torch

from aligner.logprobs.fused import hidden_states_to_logprobs
from aligner.logprobs.output_layer import VocabShard
from aligner.logprobs.top_k_top_p import TrainingSamplingParams


def logprobs_of(hidden, weight, target, vocab_size, group=None, **options):
    names = {"temperature", "top_k", "top_p"} & set(options)
    filters = {name: options.pop(name) for name in names}
    sampling = TrainingSamplingParams(**filters, keep_target=True)
    shard = VocabShard.of(weight, vocab_size, group)
    return hidden_states_to_logprobs(hidden, weight, target, shard, sampling, **options)


def _kept(logits, target, top_k, top_p):
    """Indices kept for one row of logits, by sorting in plain Python."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])[: top_k or None]
    mass = sum(math.exp(logits[v]) for v in order)
    kept, before = {target}, 0.0
    for v in order:
        if before < top_p:
            kept.add(v)
        before += math.exp(logits[v]) / mass
    return sorted(kept)


def reference_logprobs(logits, target, temperature=1.0, top_k=0, top_p=1.0, cap=None):
    """Log-probs and entropies row by row over the whole vocabulary, differentiable."""
    logprobs, entropies = [], []
    for scores, token in zip(logits / temperature, target.tolist(), strict=True):
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        kept = _kept(scores.tolist(), token, top_k, top_p)
        log_softmax = scores[kept] - scores[kept].logsumexp(0)
        logprobs.append(log_softmax[kept.index(token)])
        entropies.append(-(log_softmax.exp() * log_softmax).sum())
    return torch.stack(logprobs), torch.stack(entropies)
