"""One process's share of a role: batch-level methods over a model of either backend.

The handles call these with a data-parallel rank's share of a global batch. Results are the same on
every process of a model-parallel group.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aligner.checkpoint.adapters import adapters_beside
from aligner.checkpoint.hf.model_folder import save_hf
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.run_state.worker_state import (
    ShareWriter,
    load_optimizer_state,
    load_worker_state,
    save_optimizer_state,
    save_tokenizer,
    save_worker_state,
)
from aligner.compat.nemo_rl import PublishedRole, published_role
from aligner.config import ParallelConfig
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from aligner.distributed.named_sharding import NamedSharding
from aligner.errors import ConfigError, LayoutError, TokenizerError
from aligner.losses.interfaces import LossFunction as PublishedLossFunction
from aligner.losses.interfaces import as_loss
from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.role.model import RoleModel
from aligner.models.gpt.role.offload import ModelOffload
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.collectives import gather_objects, on_rank_zero
from aligner.parallel.groups import ParallelState, initialize_parallel
from aligner.types import LossFunction

Served = TypeVar("Served", bound=RoleModel)


def tensors_on_device(data: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a batch, on this process's device."""
    return {
        key: accelerator.to_device(value)
        for key, value in data.items()
        if isinstance(value, Tensor)
    }


def micro_batches_of(data: Mapping[str, Any], size: int | None) -> MicroBatches | None:
    """The micro-batches that a share of one global batch brings; else ``size`` rows each."""
    brought = data.micro_batch_indices if isinstance(data, BatchedDataDict) else None
    return size if brought is None else brought[0]


def passes_over(
    data: Mapping[str, Any], size: int | None
) -> tuple[dict[str, Tensor], MicroBatches | None]:
    """`tensors_on_device` and `micro_batches_of`: what a role's passes take."""
    return tensors_on_device(data), micro_batches_of(data, size)


def place_of(
    layout: ParallelConfig,
    annotations: NamedSharding | None,
    parallel: ParallelState | None,
    seed: int,
) -> ParallelState:
    """This process's place in ``layout``: ``parallel`` where it is one there, else joined.

    Raises:
        LayoutError: ``annotations``, of (pipeline, data, context, tensor), have another layout.
    """
    if annotations is not None:
        sizes = {
            "tensor_parallel": layout.tensor,
            "pipeline_parallel": layout.pipeline,
            "context_parallel": layout.context,
        }
        for axis, size in sizes.items():
            placed = annotations.shape.get(axis, 1)
            if placed != size:
                raise LayoutError(
                    f"worker_sharding_annotations: {axis} {placed}, but the configuration says "
                    f"{size}; give both the same layout"
                )
    if parallel is not None and parallel.config == layout:
        return parallel
    return initialize_parallel(layout, seed=seed)


def read_published(
    config: Mapping[str, Any], name: Literal["policy", "value"] = "policy"
) -> PublishedRole:
    """`published_role`, with the keys that only experts read held against the model."""
    role = published_role(config, name)
    if role.dense_only:
        with open_model(role.model.restore_from_path) as source:
            role.check_experts(source.architecture.num_moe_experts)
    return role


def note_unused(who: str, arguments: Mapping[str, Any]) -> None:
    """Warn about keyword arguments that have no effect here."""
    if arguments:
        warnings.warn(f"{who}: not used here: {', '.join(sorted(arguments))}", stacklevel=3)


class RoleWorker(Generic[Served]):
    """Common base of the workers of all roles: training, phases, and run state."""

    model_class: ClassVar[type[Any]]  # the backend's model of the role

    def __init__(
        self,
        model: Served,
        parallel: ParallelState,
        *,
        offloads: bool = False,
        init_optimizer: bool = False,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
    ) -> None:
        """Serve ``model``.

        Args:
            model: the role's share of a model on this process.
            parallel: this process's place.
            offloads: whether all memory leaves the device between phases.
            init_optimizer: False for a role that does not learn.
            weights_path: continue from these weights of `save_checkpoint`.
            optimizer_path: continue from this optimizer state, a directory of `save_checkpoint`.
        """
        self.model = model
        self.parallel = parallel
        self._offloads = offloads
        self._offloads_by_module: dict[nn.Module, ModelOffload] = {}
        self._share_writer = ShareWriter(self)
        if weights_path is not None:
            self.load_checkpoint(weights_path)
        if init_optimizer:
            model.setup_training()
        if optimizer_path is not None:
            load_optimizer_state(self, optimizer_path)

    @classmethod
    def load_model(cls, settings: RoleSettings, path: str, tokenizer: Tokenizer) -> Served:
        """The backend's model from a `.nemo` or a Hugging Face directory."""
        with open_model(path) as source:
            return cls.model_class.from_checkpoint(source, settings=settings, tokenizer=tokenizer)

    def __repr__(self) -> str:
        place = self.parallel
        return f"{type(self).__name__}[rank={place.rank}/{place.world_size}]"

    def train(
        self,
        data: SlicedDataDict,
        loss_fn: LossFunction | PublishedLossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One pass over this rank's rows: one optimizer step for every ``gbs`` global rows.

        Args:
            data: a shard that `BatchedDataDict.shard_by_batch_size` made, of the columns that
                ``loss_fn`` and the role read.
            loss_fn: the loss: one of `aligner.algorithms.losses`, or as NeMo-RL publishes them
                (`aligner.losses.interfaces`).
            eval_mode: forward only, no update.
            gbs: rows of a global mini-batch, over all ranks; default the role's.
            mbs: rows per forward-backward where the shard does not bring its micro-batches;
                default the role's.

        Returns:
            ``global_loss`` and ``grad_norm`` (means over the pass's steps), ``lr`` of the last
            step, ``skipped`` (a step was left out because it was not finite) and
            ``all_mb_metrics``: by name, one value per step, reduced over the global mini-batch.
        """
        loss = as_loss(loss_fn)
        history: dict[str, list[float]] = defaultdict(list)
        for number, part in enumerate(self._global_batches(data, gbs)):
            batch, passes = passes_over(part, mbs)
            if eval_mode:
                _, metrics = self.model.get_loss_and_metrics(batch, True, loss, passes)
            else:
                metrics = self.model.training_update(batch, number, loss, passes)
            for key, value in metrics.items():
                history[key].append(value)
        return {
            "global_loss": _mean(history["loss"]),
            "grad_norm": _mean(history.get("grad_norm", [0.0])),
            "lr": history.get("lr", [0.0])[-1],
            "skipped": any(history.get("skipped", [])),
            "all_mb_metrics": dict(history),
        }

    def _global_batches(self, data: SlicedDataDict, gbs: int | None) -> Iterator[SlicedDataDict]:
        """This rank's share of each global mini-batch."""
        if data.elem_counts_per_gb is not None:
            yield from (data.get_batch(number) for number in range(len(data.elem_counts_per_gb)))
            return
        gbs = gbs or self.model.settings.global_batch_size
        if gbs % self.parallel.dp_size:
            raise ConfigError(
                f"global_batch_size={gbs} does not divide over {self.parallel.dp_size} "
                "data-parallel ranks; use a multiple of it"
            )
        rows = gbs // self.parallel.dp_size
        yield from (data.get_batch(number, rows) for number in range(-(-data.size // rows)))

    # Phases -----------------------------------------------------------------------------------

    def prepare_for_training(self) -> None:
        """Weights and optimizer state to the device, training mode."""
        self.bring_back()
        self.model.prepare_for_training()

    def finish_training(self) -> None:
        """Leave training; activations' memory goes to the processes that share the device.

        With ``offload_weights`` nothing of the role stays on it.
        """
        self._gather_weights()
        self.model.finish_training()
        self._park()
        accelerator.release_shared_memory()

    def prepare_for_inference(self) -> None:
        """Weights on the device, evaluation mode; optimizer state leaves it where configured."""
        self._restore_weights()
        self.model.prepare_for_inference()

    def finish_inference(self) -> None:
        """Leave inference; with ``offload_weights`` nothing of the role stays on the device."""
        self.model.finish_inference()
        self._park()

    def bring_back(self) -> None:
        """Weights on the device, whatever phase this is."""
        for module in self._modules_with_weights():
            if module in self._offloads_by_module:  # it may be parked
                self.offload_of(module).to_device()

    def _park(self) -> None:
        """Move everything to host memory, with ``offload_weights``."""
        if not self._offloads:
            return
        self.model.drop_reused_forward()
        self.model.release_generator()
        if self.model.optimizer is not None:
            self.model.optimizer.park()
        for module in self._modules_with_weights():
            self.move_model(module, "cpu")

    def _modules_with_weights(self) -> list[nn.Module]:
        """Modules whose parameters the role has on its device."""
        return [self.model.model]

    def _gather_weights(self) -> None:
        """Make weights whole where updates leave that to later; a role that can defer it does."""

    def _restore_weights(self) -> None:
        """Weights whole and on the device, whatever phase this is."""
        self._gather_weights()
        self.bring_back()

    # State ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This process's share of weights and optimizer, exact."""
        self._restore_weights()
        return self.model.run_state()

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Inverse of `state_dict`, from what every process of the saved run returned."""
        self._restore_weights()
        self.model.load_run_state(states)

    def save_state(self, folder: str) -> None:
        """Write this process's share of the run state to ``folder``."""
        save_worker_state(self, folder)

    def prepare_saving(self) -> None:
        """Take the memory of a copy of the run state; see `ShareWriter.prepare`."""
        self._share_writer.prepare()

    def begin_saving(self, folder: str, in_background: bool) -> None:
        """Write this process's share as it is now; see `ShareWriter.begin`."""
        self._share_writer.begin(folder, in_background)

    def saving_failure(self, wait: bool) -> str | None:
        """Error with which saving failed; see `ShareWriter.failure`."""
        return self._share_writer.failure(wait)

    def load_state(self, folder: str) -> None:
        """Inverse of `save_state`, whatever layout wrote it."""
        load_worker_state(self, folder)

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the role, each part complete or not at all.

        The weights have adapters merged into them; the adapters are written beside them, too.

        Args:
            weights_path: a `.nemo` file, which holds configuration and tokenizer too; a path
                without that suffix becomes a Hugging Face directory.
            optimizer_path: directory for the float32 weights, moments and step, a file per worker.
            tokenizer_path: directory for the tokenizer's files.
            kwargs: published arguments without a counterpart; named in a warning.
        """
        note_unused("save_checkpoint", kwargs)
        self._restore_weights()
        if weights_path.endswith(".nemo"):
            self.model.save_to(weights_path)
        else:
            weights, files = self.model.whole_weights(), self._tokenizer().files()
            on_rank_zero(lambda: save_hf(weights_path, weights, self.model.architecture, files))
        if self.model.settings.lora is not None:
            self.model.save_adapters(adapters_beside(weights_path))
        if optimizer_path is not None:
            save_optimizer_state(self, optimizer_path)
        if tokenizer_path is not None:
            save_tokenizer(self._tokenizer(), tokenizer_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Inverse of `save_checkpoint`, on any layout.

        Without ``optimizer_path`` the moments and the schedule stay what they are. A role with
        adapters keeps its frozen weights and takes the adapters beside ``weights_path``.
        """
        self._restore_weights()
        if self.model.settings.lora is not None:
            self.model.load_adapters(adapters_beside(weights_path))
        else:
            with open_model(weights_path) as source:
                self.model.load_whole_weights(source.weights)
        if optimizer_path is not None:
            load_optimizer_state(self, optimizer_path)

    def _tokenizer(self) -> Tokenizer:
        if self.model.tokenizer is None:
            raise TokenizerError(
                f"the {self.model.role_name} was built without a tokenizer; give it one, or save "
                "without tokenizer_path"
            )
        return self.model.tokenizer

    # Where it is ------------------------------------------------------------------------------

    def move_model(
        self, model: nn.Module, device: str, move_params: bool = True, move_grads: bool = True
    ) -> nn.Module:
        """Move ``model``'s weights and gradient buffers to host memory, or back to the device.

        Args:
            model: this worker's, or another one on its device.
            device: ``"cpu"`` parks it in host memory, where it cannot be used (nothing moves on a
                machine without a GPU); any other device brings back all that was parked.
            move_params: park the weights.
            move_grads: free the gradient buffers; they come back as zeros.
        """
        offload = self.offload_of(model)
        if torch.device(device).type == "cpu":
            offload.to_host(params=move_params, grads=move_grads)
        else:
            offload.to_device()
        return model

    def offload_of(self, model: nn.Module) -> ModelOffload:
        """The `ModelOffload` of ``model``, which moves its weights."""
        if model not in self._offloads_by_module:
            self._offloads_by_module[model] = ModelOffload(model)
        return self._offloads_by_module[model]

    def move_optimizer(self, device: str) -> None:
        """Move the moments to host memory (``"cpu"``) or back to the device."""
        if self.model.optimizer is None:
            return
        if torch.device(device).type == "cpu":
            self.model.optimizer.offload()
        else:
            self.model.optimizer.restore()

    def has_finite_weights(self) -> bool:
        """Return whether no weight is NaN or infinite, on any worker of the role; collective."""
        self._restore_weights()
        shares = (
            p.to_local() if isinstance(p, DTensor) else p for p in self.model.model.parameters()
        )
        return all(gather_objects(all(bool(share.isfinite().all()) for share in shares)))

    def device_info(self) -> accelerator.DeviceInfo:
        """Device that this worker computes on."""
        return accelerator.device_info()

    def memory_use(self) -> accelerator.MemoryUse:
        """Memory of this worker's process, at most since `reset_peak_memory`."""
        return accelerator.memory_use()

    def reset_peak_memory(self) -> None:
        """Begin to look for peaks anew."""
        accelerator.reset_peak_memory()

    def num_parameters(self) -> int:
        """Parameters of the whole role, over all its processes."""
        count = torch.tensor(float(self.model.num_parameters()), device=accelerator.device())
        torch.distributed.all_reduce(count, group=self.parallel.model_parallel_group)
        return int(count.item())

    def start_gpu_profiling(self) -> None:
        """Begin a CUDA profiler capture range."""
        accelerator.gpu_profiler("start")

    def stop_gpu_profiling(self) -> None:
        """End it."""
        accelerator.gpu_profiler("stop")

    def shutdown(self) -> bool:
        """Nothing to stop: the process belongs to whoever started it."""
        return True


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
