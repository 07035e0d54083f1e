"""Interface of the roles that workers serve, on any backend."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import Weights
from aligner.config import Drawing, LengthParams, SamplingParams
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.models.gpt.decode.generator import GenerationOutput
from aligner.models.gpt.decode.scheduler import TokenListener
from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.role.settings import RoleSettings
from aligner.types import LossFunction


class MovableOptimizer(Protocol):
    """An optimizer whose state can wait in host memory."""

    def offload(self) -> None:
        """Moments to host memory."""
        ...

    def park(self) -> None:
        """All that it keeps beside the weights to host memory."""
        ...

    def restore(self) -> None:
        """Everything back to the device."""
        ...


class Role(Protocol):
    """A role's share on this process: `MegatronGPTModel` and `DTensorModel`."""

    role_name: str
    settings: RoleSettings
    architecture: GPTArchitecture
    tokenizer: Tokenizer | None
    loss_fn: LossFunction | None

    @property
    def model(self) -> nn.Module:
        """The module, with what wraps it for training."""
        ...

    @property
    def optimizer(self) -> MovableOptimizer | None:
        """The optimizer; None before `setup_training`, or where the role does not learn."""
        ...

    def get_loss_and_metrics(
        self, batch: Mapping[str, Tensor], forward_only: bool, mbs: MicroBatches | None = None
    ) -> tuple[float, dict[str, float]]:
        """Loss and metrics of a global batch; see `MegatronGPTModel.get_loss_and_metrics`."""
        ...

    def training_update(
        self, batch: Mapping[str, Tensor], number: int = 0, mbs: MicroBatches | None = None
    ) -> dict[str, float]:
        """One optimizer step on one global batch; see `aligner.models.gpt.role.updates.update`."""
        ...

    def setup_training(self) -> None:
        """Make the optimizer."""
        ...

    def prepare_for_training(self) -> None:
        """Enter training mode."""
        ...

    def finish_training(self) -> None:
        """Leave training."""
        ...

    def prepare_for_inference(self) -> None:
        """Enter evaluation mode."""
        ...

    def finish_inference(self) -> None:
        """Leave inference."""
        ...

    def run_state(self) -> dict[str, Any]:
        """This process's share of weights and optimizer, exact."""
        ...

    def load_run_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Inverse of `run_state`, from the shares of all processes of the saved run."""
        ...

    def save_to(self, save_path: str) -> None:
        """Write a `.nemo`."""
        ...

    def whole_weights(self) -> dict[str, Tensor]:
        """Canonical weights joined on rank 0."""
        ...

    def load_whole_weights(self, weights: Weights, strict: bool = True) -> None:
        """Inverse of `whole_weights`, on every rank."""
        ...

    def num_parameters(self) -> int:
        """Parameters on this process."""
        ...


class AdaptedRole(Protocol):
    """A role whose adapters stand for it beside frozen weights."""

    def save_adapters(self, path: str | Path) -> None:
        """Write only the adapters, and a head."""
        ...

    def load_adapters(self, path: str | Path) -> None:
        """Inverse of `save_adapters`."""
        ...


class PolicyRole(Role, Protocol):
    """A role that scores tokens and draws them."""

    def get_logprobs(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Log-probs under the current weights; see `DrawingPolicy.get_logprobs`."""
        ...

    def get_reference_logprobs(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Log-probs under the initial weights; see `DrawingPolicy.get_logprobs`."""
        ...

    def keep_reference(self, mode: Literal["keep", "swap"] = "keep") -> None:
        """Freeze the current weights as the reference policy."""
        ...

    @property
    def reference(self) -> nn.Module:
        """The policy that training began with, after `keep_reference`."""
        ...

    def configure_generation(
        self, length: LengthParams, sampling: SamplingParams, rollout_micro_batch_size: int
    ) -> None:
        """Set how `generate` draws."""
        ...

    def generate(
        self,
        prompts: Tensor,
        prompt_lengths: Tensor,
        sample_ids: Tensor,
        *,
        seed: int,
        greedy: bool | None = None,
        drawing: Drawing | None = None,
        listener: TokenListener | None = None,
    ) -> GenerationOutput:
        """Continue right-padded prompts; see
        `aligner.models.gpt.decode.generator.Generator.generate`.
        """
        ...


class CriticRole(Role, Protocol):
    """A role that estimates the values of states."""

    def get_values(
        self, batch: Mapping[str, Tensor], micro_batches: MicroBatches | None = None
    ) -> Tensor:
        """Values of the states before each token; see `MegatronGPTCriticModel.get_values`."""
        ...
