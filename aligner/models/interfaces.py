"""Interfaces of the roles, on any backend.

The Lightning-style roles (``SupervisedInterface`` and below) speak in the batches of one process;
the handles (``PolicyInterface`` and below) in global batches. Keys, shapes and masks are those of
`aligner.types`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict

from torch import Tensor

from aligner.errors import DataError

if TYPE_CHECKING:
    from aligner.config import SamplingOptions
    from aligner.distributed.batched_data_dict import BatchedDataDict
    from aligner.distributed.interfaces import WorkerFuture
    from aligner.losses.interfaces import LossFunction as PublishedLossFunction
    from aligner.types import LossFunction


class TrainingPhases(ABC):
    """A role that enters and leaves training."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Enter training: optimizer state back on the device, training mode."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Leave training."""


class InferencePhases(ABC):
    """A role that enters and leaves inference."""

    @abstractmethod
    def prepare_for_inference(self) -> None:
        """Enter inference: evaluation mode, optimizer state out of the way."""

    @abstractmethod
    def finish_inference(self) -> None:
        """Leave inference."""


class SupervisedInterface(ABC):
    """A role that learns from a loss over a batch.

    The names are NeMo-Aligner's. Its trainers call the four hooks around a step; the trainers of
    this library do not, and in its roles the hooks do nothing.
    """

    @abstractmethod
    def get_loss_and_metrics(
        self, batch: Mapping[str, Tensor], forward_only: bool
    ) -> tuple[float, dict[str, float]]:
        """Loss and metrics of this process's share of a global batch, reduced over all ranks.

        ``batch`` has the columns that the loss reads, float32 ``token_mask`` ``[B, S]`` and
        ``sample_mask`` ``[B]`` among them; see `aligner.types`. Gradients are accumulated unless
        ``forward_only``.
        """

    def prepare_for_training_step(self) -> None:  # noqa: B027 - optional for a role
        """Hook before each training batch, for a loop of a caller's own."""

    def finish_training_step(self) -> None:  # noqa: B027 - optional for a role
        """Hook after each training batch, for a loop of a caller's own."""

    def prepare_for_validation_step(self) -> None:  # noqa: B027 - optional for a role
        """Hook before each validation batch, for a loop of a caller's own."""

    def finish_validation_step(self) -> None:  # noqa: B027 - optional for a role
        """Hook after each validation batch, for a loop of a caller's own."""


class Inferrable(InferencePhases):
    """A role that answers without learning."""

    @abstractmethod
    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a batch."""


class AlignableGenerativeInterface(SupervisedInterface, TrainingPhases, Inferrable):
    """A policy: generates, scores its own and the reference's tokens, and learns."""

    @abstractmethod
    def get_inference_log_probs(self, response_tokens: Tensor) -> Tensor:
        """float32 ``[B, S]`` log-probs of int64 ``[B, S]`` tokens under the current weights."""

    @abstractmethod
    def get_init_policy_logprobs(self, response_tokens: Tensor) -> Tensor:
        """float32 ``[B, S]`` log-probs under the weights that training began with."""


class CriticModelInterface(SupervisedInterface, TrainingPhases, Inferrable):
    """A critic: predicts the value of every state and learns from returns."""

    @abstractmethod
    def infer_rm_critic(self, *args: Any, **kwargs: Any) -> Any:
        """Rewards and values from one backbone, where a reward model shares it."""


class LogprobOutputSpec(TypedDict):
    """``logprobs``: float32 ``[B, S]``."""

    logprobs: Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """``reference_logprobs``: float32 ``[B, S]``."""

    reference_logprobs: Tensor


class ValueOutputSpec(TypedDict):
    """``values``: float32 ``[B, S]``, right-shifted."""

    values: Tensor


class GenerationDatumSpec(TypedDict):
    """Input that a policy continues or scores.

    ``input_ids`` int64 ``[B, S]`` right-padded; ``input_lengths`` int64 ``[B]``; ``sample_ids``
    int64 ``[B]`` distinguishes the samples of equal prompts.
    """

    input_ids: Tensor
    input_lengths: Tensor
    sample_ids: NotRequired[Tensor]


class GenerationOutputSpec(TypedDict):
    """Output of a sampling engine.

    ``output_ids`` int64 ``[B, S]`` prompt and response, right-padded; ``generation_lengths`` int64
    ``[B]`` tokens generated; ``unpadded_sequence_lengths`` int64 ``[B]`` prompt + response;
    ``logprobs`` float32 ``[B, S]``, 0 outside the response; ``is_end`` bool ``[B]``.
    ``kept_ids`` int32 ``[B, S, K]`` is there where it was recorded (`aligner.types`).
    """

    output_ids: Tensor
    generation_lengths: Tensor
    unpadded_sequence_lengths: Tensor
    logprobs: Tensor
    is_end: Tensor


def check_generation_output(output: Mapping[str, Any]) -> None:
    """Refuse a `GenerationOutputSpec` that lacks a column; `DataError`, a ``ValueError``."""
    missing = [name for name in GenerationOutputSpec.__annotations__ if name not in output]
    if missing:
        raise DataError(
            f"what was generated lacks {', '.join(missing)}; it has {', '.join(sorted(output))}"
        )


class GenerationInterface(ABC):
    """A sampling engine over global batches."""

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Make ready to generate."""

    @abstractmethod
    def generate(
        self,
        data: "BatchedDataDict",
        greedy: bool = False,
        *,
        seed: int | None = None,
        sampling_options: "SamplingOptions | None" = None,
    ) -> "BatchedDataDict":
        """Continue prompts; see `GenerationOutputSpec`.

        Without a seed two calls differ, and the same run samples the same again.
        ``sampling_options``: lengths and sampling of this call, in place of the configured ones.
        """

    def weights_changed(self) -> None:  # noqa: B027 - nothing where the policy itself samples
        """Mark the policy's weights as changed; the next `prepare_for_generation` fetches them."""

    def recover(self) -> bool:
        """End what a `generate` that raised has left behind; whether it may be called again.

        On every rank, which all have the same answer. By default it may not.
        """
        return False

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Release the memory that only generation needs."""

    def in_words(self) -> str:
        """Description of the engine's settings for the start-up report; empty: none."""
        return ""

    def shutdown(self) -> bool:
        """End the engine."""
        return True


class PendingGeneration(Protocol):
    """A batch that an engine is sampling."""

    def result(self) -> "BatchedDataDict":
        """Wait for it; see `GenerationOutputSpec`."""
        ...

    def abandon(self) -> None:
        """End and forget it."""
        ...


class BackgroundGeneration(GenerationInterface):
    """A sampling engine that works while the policy trains."""

    @abstractmethod
    def generate_in_background(
        self, data: "BatchedDataDict", *, seed: int = 0
    ) -> PendingGeneration:
        """Begin to continue prompts; one batch at a time, and no other call until its end."""


class RoleHandleInterface(TrainingPhases):
    """A role that learns, over global batches."""

    @abstractmethod
    def train(
        self,
        data: "BatchedDataDict",
        loss_fn: "LossFunction | PublishedLossFunction",
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One pass over ``data``; one optimizer step for every ``gbs`` samples."""

    @abstractmethod
    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        """Write weights and, where given a path, optimizer state and tokenizer."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Stop the workers."""


class PolicyInterface(RoleHandleInterface):
    """A policy over global batches."""

    @abstractmethod
    def get_logprobs(self, data: "BatchedDataDict") -> "BatchedDataDict":
        """See `LogprobOutputSpec`."""

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: "BatchedDataDict", micro_batch_size: int | None = None
    ) -> "BatchedDataDict":
        """See `ReferenceLogprobOutputSpec`."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that shares its devices with a sampling engine and hands weights over to it."""

    @abstractmethod
    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """Enter log-prob inference."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Make room on the devices for an engine that takes weights over."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any]:
        """Shape and dtype of every weight, by its name in a Hugging Face state dict."""

    @abstractmethod
    def prepare_weights_for_ipc(
        self, _refit_buffer_size_gb: float | None = None
    ) -> list[list[str]]:
        """Names of all weights in groups of at most this many GiB."""

    @abstractmethod
    def get_weights_ipc_handles(
        self, keys: Sequence[str], readers: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Handles by which an engine of the same machine or device opens some weights.

        ``readers``: the machines and devices where they will be opened; default everywhere.
        """

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> "WorkerFuture":
        """Begin to meet engines elsewhere at ``ip:port``."""

    @abstractmethod
    def broadcast_weights_for_collective(self, keys: Sequence[str] | None = None) -> "WorkerFuture":
        """Begin to send weights, default all, to the engines met."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Take back what was offered."""


class ValueInterface(RoleHandleInterface, InferencePhases):
    """A critic over global batches."""

    @abstractmethod
    def get_values(
        self, data: "BatchedDataDict", micro_batch_size: int | None = None
    ) -> "BatchedDataDict":
        """See `ValueOutputSpec`."""
