"""One process's share of a policy on a transformers model, as FSDP2 and DTensors."""

from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.policy.workers.policy_worker import PolicyWorker


class DTensorPolicyWorkerV2(PolicyWorker[DTensorActorModel]):
    """Worker of `Policy` on this backend."""

    model_class = DTensorActorModel
