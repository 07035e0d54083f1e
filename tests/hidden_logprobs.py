"""Log-probs from hidden states, by sampling options in keywords."""

from aligner.logprobs.fused import hidden_states_to_logprobs
from aligner.logprobs.output_layer import VocabShard
from aligner.logprobs.top_k_top_p import TrainingSamplingParams


def logprobs_of(hidden, weight, target, vocab_size, group=None, **options):
    names = {"temperature", "top_k", "top_p"} & set(options)
    filters = {name: options.pop(name) for name in names}
    sampling = TrainingSamplingParams(**filters, keep_target=True)
    shard = VocabShard.of(weight, vocab_size, group)
    return hidden_states_to_logprobs(hidden, weight, target, shard, sampling, **options)
