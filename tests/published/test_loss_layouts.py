"""A published loss gives the numbers of the same loss of this library, in every layout.

Loss and gradient norm of two updates, on two ranks, of logits that all ranks have whole.
"""

import pytest
from loaded import load_policy
from ranks import on_ranks
from test_losses import ROWS, NLLOfLogprobs, batch, nll_of_logits

from aligner.config import ModelConfig, OptimConfig
from aligner.losses.language import NegativeLogLikelihoodLoss

LAYOUTS = {
    "tp": {"tensor_model_parallel_size": 2},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
    "dp": {},
}


def learned(nemo):
    """Loss and gradient norm of each update, by backend, layout and loss."""
    results, sizes = {}, {"micro_batch_size": 2, "global_batch_size": ROWS}
    for backend, name in [*(("megatron", name) for name in LAYOUTS), ("dtensor", "tp")]:
        for loss in (NegativeLogLikelihoodLoss(), nll_of_logits, NLLOfLogprobs()):
            config = ModelConfig(nemo, **sizes, optim=OptimConfig(lr=1e-2), **LAYOUTS[name])
            policy = load_policy(config, backend=backend)
            policy.prepare_for_training()
            updates = [policy.train(batch(), loss) for _ in range(2)]
            loss_name = getattr(loss, "__name__", type(loss).__name__)
            results[backend, name, loss_name] = [
                (update["loss"], update["grad_norm"]) for update in updates
            ]
    return results


@pytest.mark.extended
def test_every_layout_learns_the_same(tiny_nemo):
    results = on_ranks(2, learned, str(tiny_nemo))
    expected = results["megatron", "dp", "NegativeLogLikelihoodLoss"]
    assert expected[1][0] < expected[0][0]
    assert len(results) == 18
    for case, updates in results.items():
        for ours, theirs in zip(expected, updates, strict=True):
            assert theirs == pytest.approx(ours, rel=2e-4), case
