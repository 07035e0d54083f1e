"""The DTensor policy worker under its name without a version."""

from aligner.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

DTensorPolicyWorker = DTensorPolicyWorkerV2
