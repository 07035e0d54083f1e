"""Memory that a run will need, before anything is allocated. Estimates, not measurements."""

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
    optimizer_bytes: int = 8  # per parameter: Adam's two moments 8, and 4 more for a master copy
    adapter_parameters: int = 0  # beside those; where there are any, only they are trained

    @property
    def local_parameters(self) -> int:
        """Parameters held by this process."""
        return -(-(self.parameters + self.adapter_parameters) // self.model_parallel_size)

    @property
    def learning_parameters(self) -> int:
        """Number of parameters that are trained."""
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
        """Bytes of the gradients; 0 for a frozen model."""
        return self.learning_parameters * self.gradient_bytes

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer state; 0 for a frozen model."""
        return -(-self.learning_parameters // self.optimizer_shards) * self.optimizer_bytes

    @property
    def run_state(self) -> int:
        """Bytes of this process's share of a run state: float32 weights, and Adam's moments."""
        return -(-self.learning_parameters // self.optimizer_shards) * 12

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


def kv_cache_bytes(
    *,
    layers: int,
    query_groups: int,
    kv_channels: int,
    sequences: int,
    length: int,
    value_bytes: int,
) -> int:
    """Keys and values of ``sequences`` sequences of ``length`` tokens on all ``layers`` given."""
    return 2 * layers * query_groups * kv_channels * sequences * length * value_bytes


def activation_bytes(
    *, layers: int, hidden_size: int, tokens: int, value_bytes: int, recompute: bool
) -> int:
    """Activations that layers keep for the backward pass of a micro-batch of ``tokens`` tokens.

    17 values per token, layer and hidden unit (Korthikanti et al. 2022, their 34 bytes in 16 bit,
    attention scores not stored); with full recomputation only each layer's input is kept, and one
    layer's worth while it is recomputed. Left out: wider feed-forward layers than 4 times the
    hidden size, experts, and what is alive for a moment in the backward pass.
    """
    per_layer = tokens * hidden_size * value_bytes
    return per_layer * (layers + 17) if recompute else per_layer * 17 * layers


def head_bytes(*, hidden_size: int, tokens: int, tile_bytes: int) -> int:
    """Memory that the output layer keeps for ``tokens`` predicted tokens.

    Float32 hidden states and their gradient, and the two tiles of logits that are alive at once.
    """
    return 2 * tokens * hidden_size * 4 + 2 * tile_bytes
