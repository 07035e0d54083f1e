"""Memory of a megatron-core role, phase by phase, and its state while it is there."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import nn

from aligner.architecture import GPTArchitecture
from aligner.distributed import accelerator
from aligner.distributed.parallel import ParallelState
from aligner.models.gpt.megatron.forward_reuse import KeptPass
from aligner.models.gpt.megatron.optimizer import RoleOptimizer
from aligner.models.gpt.megatron.state import load_role_state, role_state
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.gpt.role.updates import trainable


class RolePhases:
    """The phases and the run state of `MegatronGPTModel`, which has what is declared here."""

    settings: RoleSettings
    architecture: GPTArchitecture
    parallel: ParallelState
    model: nn.Module
    optimizer: RoleOptimizer | None
    kept_pass: KeptPass

    @property
    def gpt(self) -> GPTModel:
        """The megatron-core model, without the data-parallel wrapper."""
        return self.model.module if self.optimizer is not None else self.model

    def setup_training(self) -> None:
        """Make gradient buffers and the optimizer."""
        raise NotImplementedError

    def prepare_for_training(self) -> None:
        """Bring the optimizer state back, or make the optimizer, and enter training mode."""
        self.setup_training()
        trainable(self.optimizer).restore()
        self.model.train()

    def finish_training(self) -> None:
        """End training; the next phase moves weights and optimizer state."""
        self.collect_weights()

    def collect_weights(self) -> None:
        """Weights are whole and new on every rank; see `RoleOptimizer.collect_weights`."""
        if self.optimizer is not None:
            self.optimizer.collect_weights()

    def prepare_for_inference(self) -> None:
        """Enter evaluation mode; gradients and moments leave the device where configured."""
        self.kept_pass.drop()
        self.collect_weights()
        if self.optimizer is not None and self.settings.offload_gradients:
            self.optimizer.park_gradients()
        if self.optimizer is not None and self.settings.offload_adam_states:
            self.optimizer.offload()
        self.model.eval()

    def finish_inference(self) -> None:
        """Memory that inference cached goes to the processes that share the device."""
        accelerator.release_shared_memory()

    def run_state(self) -> dict[str, Any]:
        """This process's share of weights and optimizer, exact; see `megatron.state`."""
        self.collect_weights()
        self._bring_gradients()
        return role_state(
            self.gpt, self.architecture, self.parallel, self.optimizer, self.settings.lora
        )

    def load_run_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Inverse of `run_state`, from the shares of all processes of the run that was saved."""
        self._bring_gradients()
        load_role_state(
            self.gpt, self.architecture, self.parallel, self.optimizer, self.settings.lora, states
        )

    def _bring_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.bring_gradients()
