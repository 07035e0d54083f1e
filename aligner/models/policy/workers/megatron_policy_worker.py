"""One process's share of a policy on megatron-core."""

from aligner.models.gpt.megatron.actor import MegatronGPTActorModel
from aligner.models.policy.workers.policy_worker import PolicyWorker


class MegatronPolicyWorker(PolicyWorker[MegatronGPTActorModel]):
    """Worker of `Policy` on this backend."""

    model_class = MegatronGPTActorModel
