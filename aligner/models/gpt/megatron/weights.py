"""Weights of a megatron-core role in and out: run states, whole weights, adapters, the head."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from aligner.checkpoint.canonical import REWARD_HEAD
from aligner.checkpoint.gpt_weights import gather_weights, load_weights
from aligner.errors import CheckpointError
from aligner.models.gpt.lora.adapters import RoleAdapters
from aligner.models.gpt.megatron.optimizer import RoleOptimizer
from aligner.models.gpt.megatron.state import load_sharded_state, sharded_state
from aligner.models.gpt.role.model import RoleModel


class RoleWeights(RoleModel):
    """Weights of `MegatronGPTModel`, which has the attributes declared here."""

    optimizer: RoleOptimizer | None
    adapters: RoleAdapters | None

    @property
    def gpt(self) -> GPTModel:
        """The megatron-core model, without the data-parallel wrapper."""
        return self.model.module if self.optimizer is not None else self.model

    def collect_weights(self) -> None:
        """See `RoleOptimizer.collect_weights`."""
        if self.optimizer is not None:
            self.optimizer.collect_weights()

    def run_state(self) -> dict[str, Any]:
        """This process's share of weights and optimizer, exact; see `megatron.state`."""
        self.collect_weights()
        self._bring_gradients()
        return sharded_state(
            self.gpt, self.architecture, self.parallel, self.optimizer, self.settings.lora
        )

    def load_run_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Inverse of `run_state`, from the shares of all processes of the run that was saved."""
        self._bring_gradients()
        load_sharded_state(
            self.gpt, self.architecture, self.parallel, self.optimizer, self.settings.lora, states
        )

    def _bring_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.bring_gradients()

    def load_whole_weights(self, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        """See `RoleModel.load_whole_weights`."""
        load_weights(
            self.gpt,
            weights,
            self.architecture,
            tp_rank=self.parallel.tp_rank,
            tp_size=self.settings.parallel.tensor,
        )
        self.load_head(weights, strict)
        if self.optimizer is not None:
            self.optimizer.take_over_weights()

    def load_adapters(self, path: str | Path) -> None:
        """See `RoleModel.load_adapters`."""
        assert self.adapters is not None
        self.adapters.load(path)
        if self.optimizer is not None:
            self.optimizer.take_over_weights()

    def save_adapters(self, path: str | Path) -> None:
        """See `RoleModel.save_adapters`."""
        assert self.adapters is not None
        self.adapters.save(path, self.nemo_keys())

    def load_head(self, weights: Mapping[str, Tensor], strict: bool) -> None:
        """Copy the reward head, weight [K, H] and bias [K], where both the model and the checkpoint
        have one.

        Raises:
            CheckpointError: the shapes differ and ``strict`` is set.
        """
        head = getattr(self.gpt, "rm_head", None)
        if head is None:
            return
        for name in REWARD_HEAD:
            target = head.get_parameter(name.removeprefix("rm_head."))
            if name not in weights:
                continue
            if weights[name].shape == target.shape:
                target.data.copy_(weights[name])
            elif strict:
                raise CheckpointError(
                    f"{name} has shape {tuple(weights[name].shape)}, this role's is "
                    f"{tuple(target.shape)}; pass strict=False to start with a fresh head"
                )

    def whole_weights(self) -> dict[str, Tensor]:
        """See `RoleModel.whole_weights`."""
        self.collect_weights()
        return gather_weights(
            self.gpt,
            self.architecture,
            tp_group=self.parallel.tp_group,
            pp_group=self.parallel.pp_group,
            ep_group=self.parallel.ep_group,
        )

    def nemo_keys(self) -> dict[str, Any]:
        """Keys that a role adds to the `.nemo`'s ``model_config.yaml``."""
        return {}
