"""Weights of a megatron-core role in and out: whole ones, adapters, the reward head."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from aligner.checkpoint.canonical import REWARD_HEAD
from aligner.checkpoint.gpt_weights import gather_weights, load_weights
from aligner.errors import CheckpointError
from aligner.models.gpt.lora.adapters import RoleAdapters
from aligner.models.gpt.megatron.phases import RolePhases


class RoleWeights(RolePhases):
    """Weights of `MegatronGPTModel`, which has the attributes declared here."""

    adapters: RoleAdapters | None

    def load_whole_weights(self, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load this process's share of canonical weights, on every rank; inverse of
        `whole_weights`.

        ``weights``: whole tensors, [out, in] or [out], in any float dtype.
        """
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
        """Take adapters, and a head, that `save_adapters` wrote; on every rank."""
        assert self.adapters is not None
        self.adapters.load(path)
        if self.optimizer is not None:
            self.optimizer.take_over_weights()

    def save_adapters(self, path: str | Path) -> None:
        """Write only the adapters, and a head; on every rank."""
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
        """Canonical weights joined on rank 0, none elsewhere; call it on every rank.

        Adapters are merged into them.
        """
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
