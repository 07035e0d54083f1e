"""Estimates of the memory that a run will need, before anything is allocated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RoleMemory:
    """One model on one process."""

    name: str  # policy, critic, reference, …
    parameters: int  # of the whole model
    trainable: bool
    model_parallel_size: int = 1  # processes that share one replica
    optimizer_shards: int = 1  # processes that share the optimizer state of one such part
    weight_bytes: int = 4  # per parameter: 4 float32, 2 bf16
    gradient_bytes: int = 4  # per parameter, while training
    optimizer_bytes: int = 8  # per parameter: 8 for Adam's two moments, 4 more for a master copy
    adapter_parameters: int = 0  # in addition to ``parameters``. If positive, only these train

    @property
    def local_parameters(self) -> int:
        """Number of parameters on this process."""
        return -(-(self.parameters + self.adapter_parameters) // self.model_parallel_size)

    @property
    def learning_parameters(self) -> int:
        """Number of parameters on this process that are trained."""
        if not self.trainable:
            return 0
        adapters = -(-self.adapter_parameters // self.model_parallel_size)
        return adapters or self.local_parameters

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return self.local_parameters * self.weight_bytes

    @property
    def gradients(self) -> int:
        """Bytes of the gradients. 0 for a frozen model."""
        return self.learning_parameters * self.gradient_bytes

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer state. 0 for a frozen model."""
        return -(-self.learning_parameters // self.optimizer_shards) * self.optimizer_bytes

    @property
    def run_state(self) -> int:
        """Bytes of this process's share of a run state: float32 weights and Adam's moments."""
        return -(-self.learning_parameters // self.optimizer_shards) * 12

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer
