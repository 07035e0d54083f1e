"""One rank of `test_loss_layouts`: a policy learns twice from each of the losses, in one layout."""

import sys

import torch
from test_losses import ROWS, NLLOfLogprobs, batch, nll_of_logits

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import ModelConfig, OptimConfig
from aligner.distributed.worker_groups import LocalCluster
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.groups import initialize_parallel

LAYOUTS = {
    "tp": {"tensor_model_parallel_size": 2},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
    "dp": {},
}


def main(model: str, out: str) -> None:
    seen = {}
    for backend, name in [*(("megatron", name) for name in LAYOUTS), ("dtensor", "tp")]:
        for loss in (NegativeLogLikelihoodLoss(), nll_of_logits, NLLOfLogprobs()):
            config = ModelConfig(
                model,
                micro_batch_size=2,
                global_batch_size=ROWS,
                optim=OptimConfig(lr=1e-2),
                **LAYOUTS[name],
            )
            cluster = LocalCluster(initialize_parallel(config.parallel))
            with open_nemo(model) as checkpoint:
                policy = Policy(
                    cluster,
                    config,
                    checkpoint.tokenizer,
                    init_reference_model=False,
                    backend=backend,
                )
            policy.prepare_for_training()
            results = [policy.train(batch(), loss) for _ in range(2)]
            told = getattr(loss, "__name__", type(loss).__name__)
            seen[backend, name, told] = [(each["loss"], each["grad_norm"]) for each in results]
    if torch.distributed.get_rank() == 0:
        torch.save(seen, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
