"""Interfaces of the roles, on any backend.

The first classes have methods for the rows of one process. Classes of handles, from
`LogprobOutputSpec` on, have methods for global batches. `aligner.types` defines the columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict

from torch import Tensor

if TYPE_CHECKING:
    from aligner.config import SamplingOptions
    from aligner.distributed.batched_data_dict import BatchedDataDict
    from aligner.distributed.interfaces import WorkerFuture


class TrainingPhases(ABC):
    """A role that enters and leaves training."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Enter training: move optimizer state to the device, and set training mode."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Leave training."""


class SupervisedInterface(ABC):
    """A role that trains on a loss. The hooks are NeMo-Aligner's and are never called."""

    @abstractmethod
    def get_loss_and_metrics(
        self, batch: Mapping[str, Tensor], forward_only: bool
    ) -> tuple[float, dict[str, float]]:
        """See `RoleModel.get_loss_and_metrics`."""

    def prepare_for_training_step(self) -> None:  # noqa: B027 - optional for a role
        """Hook before or after a training or validation batch. Does nothing by default."""

    finish_training_step = prepare_for_training_step
    prepare_for_validation_step = finish_validation_step = prepare_for_training_step


class Inferrable(ABC):
    """A role with inference."""

    @abstractmethod
    def prepare_for_inference(self) -> None:
        """Enter inference: set evaluation mode, and move optimizer state off the device."""

    @abstractmethod
    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Run inference on a batch."""

    @abstractmethod
    def finish_inference(self) -> None:
        """Leave inference."""


class AlignableGenerativeInterface(SupervisedInterface, TrainingPhases, Inferrable):
    """A policy that samples responses, computes log-probs of tokens, and trains."""

    @abstractmethod
    def get_inference_log_probs(self, response_tokens: Tensor) -> Tensor:
        """Return log-probs, float32 [B, S], of int64 [B, S] tokens under the current weights."""

    @abstractmethod
    def get_init_policy_logprobs(self, response_tokens: Tensor) -> Tensor:
        """Return log-probs, float32 [B, S], of int64 [B, S] tokens under the initial weights."""


class CriticModelInterface(SupervisedInterface, TrainingPhases, Inferrable):
    """A critic that predicts the value of every state and trains on returns."""

    @abstractmethod
    def infer_rm_critic(self, *args: Any, **kwargs: Any) -> Any:
        """Compute values, and rewards if a reward model shares the backbone."""


class LogprobOutputSpec(TypedDict):
    """Log-probs of the current policy. ``logprobs``: float32 ``[B, S]``."""

    logprobs: Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """Log-probs of the reference policy. ``reference_logprobs``: float32 ``[B, S]``."""

    reference_logprobs: Tensor


class ValueOutputSpec(TypedDict):
    """Values of a critic. ``values``: float32 ``[B, S]``, column t: the state before token t."""

    values: Tensor


class GenerationDatumSpec(TypedDict):
    """Input of a policy that generates or computes log-probs.

    ``input_ids``: int64 ``[B, S]``, right-padded. ``input_lengths``: int64 ``[B]``.
    ``sample_ids``: int64 ``[B]``, selects random numbers. Rows of equal prompts need different ids.
    """

    input_ids: Tensor
    input_lengths: Tensor
    sample_ids: NotRequired[Tensor]


class GenerationOutputSpec(TypedDict):
    """Output of a sampling engine.

    ``output_ids``: int64 ``[B, S]``, prompt and response, right-padded. ``generation_lengths``:
    int64 ``[B]``, length of the response. ``unpadded_sequence_lengths``: int64 ``[B]``, length of
    prompt and response. ``logprobs``: float32 ``[B, S]``, 0 outside the response. ``is_end``: bool
    ``[B]``, the response ended by EOS or a stop string. If they are recorded, ``kept_ids``, int32
    ``[B, S, K]`` (see `aligner.types`), is an additional column.
    """

    output_ids: Tensor
    generation_lengths: Tensor
    unpadded_sequence_lengths: Tensor
    logprobs: Tensor
    is_end: Tensor


class GenerationInterface(ABC):
    """A sampling engine whose methods take and return global batches."""

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Make the engine ready to generate with the policy's current weights."""

    @abstractmethod
    def generate(
        self,
        data: "BatchedDataDict",
        greedy: bool = False,
        *,
        seed: int | None = None,
        sampling_options: "SamplingOptions | None" = None,
    ) -> "BatchedDataDict":
        """Sample responses to prompts (see `GenerationOutputSpec`).

        ``seed``: seed of the random numbers. By default every call of a run has another seed, and a
        repeated run has the same seeds. ``greedy``: choose the most likely tokens.
        ``sampling_options``: length limits and sampling that replace the configured ones.
        """

    @abstractmethod
    def weights_changed(self) -> None:
        """Record that training changed the policy. `prepare_for_generation` loads the weights."""

    def recover(self) -> bool:
        """Clean up after an error in `generate`. Returns whether `generate` may be called again."""
        return False

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Free the memory that only generation needs."""

    def in_words(self) -> str:
        """Describe the engine's settings for the start-up report, or return an empty string."""
        return ""

    def shutdown(self) -> bool:
        """Stop the engine."""
        return True


class PendingGeneration(Protocol):
    """A batch that an engine is sampling."""

    def result(self) -> "BatchedDataDict":
        """Wait for the batch and return it (see `GenerationOutputSpec`)."""

    def abandon(self) -> None:
        """Stop sampling the batch."""


class BackgroundGeneration(GenerationInterface):
    """A sampling engine that can generate while the policy trains."""

    @abstractmethod
    def generate_in_background(
        self, data: "BatchedDataDict", *, seed: int = 0
    ) -> PendingGeneration:
        """Start to sample a batch. Other methods must not be called until it has ended."""


class PolicyInterface(TrainingPhases):
    """A policy whose methods take and return global batches."""

    @abstractmethod
    def get_logprobs(self, data: "BatchedDataDict") -> "BatchedDataDict":
        """See `LogprobOutputSpec`."""

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: "BatchedDataDict", micro_batch_size: int | None = None
    ) -> "BatchedDataDict":
        """See `ReferenceLogprobOutputSpec`."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that sends its weights to sampling engines, on its own or other devices."""

    @abstractmethod
    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """Enter the computation of log-probs: set evaluation mode."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Free device memory for an engine on the same device that will load the weights."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any]:
        """Return shape and dtype of every weight by its Hugging Face name."""

    @abstractmethod
    def prepare_weights_for_ipc(
        self, _refit_buffer_size_gb: float | None = None
    ) -> list[list[str]]:
        """Return all weight names, in groups of at most ``_refit_buffer_size_gb`` GiB each."""

    @abstractmethod
    def get_weights_ipc_handles(
        self, keys: Sequence[str], readers: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Return shared-memory handles of weights, for the engines ``readers`` on this machine."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> "WorkerFuture":
        """Start to connect to remote engines at ``ip:port``, as a group of ``world_size``."""

    @abstractmethod
    def broadcast_weights_for_collective(self, keys: Sequence[str] | None = None) -> "WorkerFuture":
        """Start to send the weights ``keys`` (default: all) to the connected engines."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Close the handles of `get_weights_ipc_handles`."""


class ValueInterface(TrainingPhases):
    """Critic whose methods take and return global batches."""

    @abstractmethod
    def get_values(
        self, data: "BatchedDataDict", micro_batch_size: int | None = None
    ) -> "BatchedDataDict":
        """See `ValueOutputSpec`."""
