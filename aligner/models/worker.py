"""`RoleWorker`: base class of the workers. A worker is one process of a role."""

import pkgutil
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aligner.checkpoint.adapters import adapters_beside
from aligner.checkpoint.hf.any_model import save_any
from aligner.checkpoint.hf.model_folder import save_hf
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.run_state.worker_state import (
    ShareWriter,
    load_optimizer_state,
    load_worker_state,
    save_optimizer_state,
    save_tokenizer,
)
from aligner.config import ParallelConfig
from aligner.config.translation.nemo_rl import PublishedRole, published_role
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from aligner.distributed.named_sharding import NamedSharding
from aligner.errors import ConfigError, LayoutError, TokenizerError
from aligner.losses.interfaces import AnyLossFunction
from aligner.models.gpt.forward.schedule import MicroBatches
from aligner.models.gpt.role.model import RoleModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.gpt.role.training_state import ModelOffload
from aligner.parallel.collectives import gather_objects, on_rank_zero
from aligner.parallel.groups import ParallelState, initialize_parallel

RoleT = TypeVar("RoleT", bound=RoleModel)


def tensors_on_device(data: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a batch, copied to this process's device."""
    return {
        key: accelerator.to_device(value)
        for key, value in data.items()
        if isinstance(value, Tensor)
    }


def passes_over(
    data: Mapping[str, Any], size: int | None
) -> tuple[dict[str, Tensor], MicroBatches | None]:
    """Return a batch's tensors on the device, and its micro-batches, or ``size`` if it has none."""
    indices = data.micro_batch_indices if isinstance(data, BatchedDataDict) else None
    return tensors_on_device(data), size if indices is None else indices[0]


def place_of(
    layout: ParallelConfig,
    annotations: NamedSharding | None,
    parallel: ParallelState | None,
    seed: int,
) -> ParallelState:
    """Return ``parallel`` if it has ``layout``. Otherwise create process groups for ``layout``.

    ``annotations``: sharding for which the caller started the workers, or None. Raises
    `LayoutError` if the annotations differ from ``layout``.
    """
    if annotations is not None:
        for axis in ("tensor", "pipeline", "context"):
            size = getattr(layout, axis)
            annotated_size = annotations.shape.get(f"{axis}_parallel", 1)
            if annotated_size != size:
                raise LayoutError(
                    f"worker_sharding_annotations have {axis}_parallel={annotated_size}, but the "
                    f"configuration has {size}. Use the same layout in both"
                )
    if parallel is not None and parallel.config == layout:
        return parallel
    return initialize_parallel(layout, seed=seed)


def read_published(
    config: Mapping[str, Any], name: Literal["policy", "value"] = "policy"
) -> PublishedRole:
    """Parse NeMo-RL's mapping of a role, and check its keys for experts against the model."""
    role = published_role(config, name)
    if role.dense_only:
        with open_model(role.model.restore_from_path) as source:
            role.check_experts(source.architecture.num_moe_experts)
    return role


def note_unused(caller: str, arguments: Mapping[str, Any]) -> None:
    """Warn that ``caller`` ignores these keyword arguments."""
    if arguments:
        warnings.warn(f"{caller}: not used here: {', '.join(sorted(arguments))}", stacklevel=3)


class RoleWorker(Generic[RoleT]):
    """Base class of the workers of all roles: trains, changes phases, and saves the run state.

    A handle calls the methods with the rows of this data-parallel rank. Every process of a
    model-parallel group returns the same results.
    """

    model_path: ClassVar[str]  # class of the role's model on the backend, ``module:class``

    def __init__(
        self,
        model: RoleT,
        parallel: ParallelState,
        *,
        offloads: bool = False,
        init_optimizer: bool = False,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
    ) -> None:
        """Store ``model``, create its optimizer, and load its state if paths are given.

        ``parallel``: process groups of the model. ``offloads``: free the device between phases.
        ``init_optimizer``: False for a frozen role. ``weights_path``, ``optimizer_path``: files
        that `save_checkpoint` wrote.
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
    def model_class(cls) -> type[Any]:
        """Import the class at `model_path`."""
        return pkgutil.resolve_name(cls.model_path)

    @classmethod
    def load_model(cls, settings: RoleSettings, path: str, tokenizer: Tokenizer) -> RoleT:
        """Load the role's model from a `.nemo` file or a Hugging Face directory."""
        model_class, trusted = cls.model_class(), settings.trust_remote_code
        has_lora = settings.lora is not None
        with open_model(path, model_class.backend, has_lora, trusted=trusted) as source:
            return model_class.from_checkpoint(source, settings=settings, tokenizer=tokenizer)

    def __repr__(self) -> str:
        parallel = self.parallel
        return f"{type(self).__name__}[rank={parallel.rank}/{parallel.world_size}]"

    def train(
        self,
        data: SlicedDataDict,
        loss_fn: AnyLossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Run one epoch over this rank's rows (see `RoleHandle.train`).

        ``data``: a result of `BatchedDataDict.shard_by_batch_size`. ``mbs`` is used if ``data``
        defines no micro-batches. In the result, ``loss`` has the name ``global_loss``.
        """
        # Metrics of every step, which the model has reduced over the ranks.
        history: dict[str, list[float]] = defaultdict(list)
        for index, part in enumerate(self._global_batches(data, gbs)):
            batch, passes = passes_over(part, mbs)
            if eval_mode:
                _, metrics = self.model.get_loss_and_metrics(batch, True, loss_fn, passes)
            else:
                metrics = self.model.training_update(batch, index, loss_fn, passes)
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
        if data.elem_counts_per_gb is not None:
            yield from (data.get_batch(index) for index in range(len(data.elem_counts_per_gb)))
            return
        # Otherwise every rank has the same number of rows.
        gbs = gbs or self.model.settings.global_batch_size
        if gbs % self.parallel.dp_size:
            raise ConfigError(
                f"global_batch_size={gbs} must be a multiple of {self.parallel.dp_size}, the "
                "number of data-parallel ranks"
            )
        rows = gbs // self.parallel.dp_size
        yield from (data.get_batch(index, rows) for index in range(-(-data.size // rows)))

    # Phases -----------------------------------------------------------------------------------

    def prepare_for_training(self) -> None:
        """Move weights and optimizer state to the device, and enter training mode."""
        self.move_to_device()
        self.model.prepare_for_training()

    def finish_training(self) -> None:
        """End training. With ``offload_weights``, move all memory of the role to the host."""
        self.model.finish_training()
        self._park()
        accelerator.release_shared_memory()

    def prepare_for_inference(self) -> None:
        """Enter evaluation mode with weights on the device, optimizer state off it if set so."""
        self._restore_weights()
        self.model.prepare_for_inference()

    def finish_inference(self) -> None:
        """End inference. With ``offload_weights``, move all memory of the role to the host."""
        self.model.finish_inference()
        self._park()

    def move_to_device(self) -> None:
        """Move the weights to the device in any phase."""
        for module in self._modules_with_weights():
            if module in self._offloads_by_module:
                self.offload_of(module).to_device()

    def _park(self) -> None:
        """With ``offload_weights``, move all device memory of the role to the host."""
        if not self._offloads:
            return
        # Memory other than weights first: autograd graphs, CUDA graphs, optimizer state.
        self.model.drop_reused_forward()
        self.model.release_generator()
        if self.model.optimizer is not None:
            self.model.optimizer.park()
        for module in self._modules_with_weights():
            self.move_model(module, "cpu")

    def _modules_with_weights(self) -> list[nn.Module]:
        return [self.model.model]

    def _restore_weights(self) -> None:
        self.model.collect_weights()
        self.move_to_device()

    # State ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this process's shards of weights and optimizer state."""
        self._restore_weights()
        return self.model.run_state()

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore this process's shards. ``states``: `state_dict` of all processes that saved."""
        self._restore_weights()
        self.model.load_run_state(states)

    def prepare_saving(self) -> None:
        """Allocate memory for a copy of the run state (see `ShareWriter.prepare`)."""
        self._share_writer.prepare()

    def begin_saving(self, folder: str, in_background: bool) -> None:
        """Begin to write this process's run state (see `ShareWriter.begin`)."""
        self._share_writer.begin(folder, in_background)

    def saving_failure(self, wait: bool) -> str | None:
        """Return the error of saving, if any (see `ShareWriter.failure`)."""
        return self._share_writer.failure(wait)

    def load_state(self, folder: str) -> None:
        """Load a run state that `begin_saving` wrote. The parallel layout may have changed."""
        load_worker_state(self, folder)

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Write model, optimizer state and tokenizer (see `RoleHandle.save_checkpoint`).

        Adapters are merged into the weights, and also written next to them. ``kwargs``: ignored.
        """
        note_unused("save_checkpoint", kwargs)
        self._restore_weights()
        # The suffix selects the format, unless only a directory can contain the model.
        architecture = self.model.architecture
        is_nemo = weights_path.endswith(".nemo")
        if is_nemo and not architecture.has_table:
            raise ConfigError(
                f"{weights_path}: a .nemo file cannot contain a {architecture.family} model of "
                "transformers. Pass the path of a directory, without the suffix .nemo"
            )
        if is_nemo:
            self.model.save_to(weights_path)
        else:
            weights, files = self.model.whole_weights(), self._tokenizer().files()
            folder, keys = Path(weights_path), self.model.nemo_keys()
            save = save_hf if architecture.has_table else save_any
            on_rank_zero(lambda: save(folder, weights, architecture, files, keys))
        if self.model.settings.lora is not None:
            self.model.save_adapters(adapters_beside(weights_path))
        if optimizer_path is not None:
            save_optimizer_state(self, optimizer_path)
        if tokenizer_path is not None:
            save_tokenizer(self._tokenizer(), tokenizer_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Load files of `save_checkpoint`. Without ``optimizer_path``, moments do not change.

        A role with adapters keeps its frozen weights and loads the adapters next to
        ``weights_path``.
        """
        self._restore_weights()
        if self.model.settings.lora is not None:
            self.model.load_adapters(adapters_beside(weights_path))
        else:
            trusted = self.model.settings.trust_remote_code
            with open_model(weights_path, self.model.backend, trusted=trusted) as source:
                self.model.load_whole_weights(source.weights)
        if optimizer_path is not None:
            load_optimizer_state(self, optimizer_path)

    def _tokenizer(self) -> Tokenizer:
        if self.model.tokenizer is None:
            raise TokenizerError(
                f"the {self.model.role_name} was built without a tokenizer. Pass a tokenizer to "
                "its constructor, or save without tokenizer_path"
            )
        return self.model.tokenizer

    # Device -----------------------------------------------------------------------------------

    def move_model(
        self, model: nn.Module, device: str, move_params: bool = True, move_grads: bool = True
    ) -> nn.Module:
        """Move weights and gradient buffers of ``model`` to host memory, or back to the device.

        ``device``: ``"cpu"`` frees device memory (no effect without a GPU). Any other device
        restores all memory, with gradients of 0. ``move_params``: free the weights.
        ``move_grads``: free the gradient buffers.
        """
        offload = self.offload_of(model)
        if torch.device(device).type == "cpu":
            offload.to_host(params=move_params, grads=move_grads)
        else:
            offload.to_device()
        return model

    def offload_of(self, model: nn.Module) -> ModelOffload:
        """Return the `ModelOffload` of ``model``, created at the first call."""
        if model not in self._offloads_by_module:
            self._offloads_by_module[model] = ModelOffload(model)
        return self._offloads_by_module[model]

    def move_optimizer(self, device: str) -> None:
        """Move Adam's moments to host memory (``"cpu"``), or back to the device."""
        if self.model.optimizer is None:
            return
        if torch.device(device).type == "cpu":
            self.model.optimizer.offload()
        else:
            self.model.optimizer.restore()

    def has_finite_weights(self) -> bool:
        """Return whether all weights are finite on all workers, which must all call this."""
        self._restore_weights()
        shares = (
            p.to_local() if isinstance(p, DTensor) else p for p in self.model.model.parameters()
        )
        return all(gather_objects(all(bool(share.isfinite().all()) for share in shares)))

    def device_info(self) -> accelerator.DeviceInfo:
        """Return name and memory of this worker's device."""
        return accelerator.device_info()

    def way_in_words(self) -> str:
        """See `RoleModel.way_in_words`."""
        return self.model.way_in_words()

    def memory_use(self) -> accelerator.MemoryUse:
        """Measure the memory of this worker's process, with peaks since `reset_peak_memory`."""
        return accelerator.memory_use()

    def reset_peak_memory(self) -> None:
        """Reset the peaks of memory use."""
        accelerator.reset_peak_memory()

    def start_gpu_profiling(self) -> None:
        """Start a CUDA profiler capture range."""
        accelerator.gpu_profiler("start")

    def stop_gpu_profiling(self) -> None:
        """Stop the CUDA profiler capture range."""
        accelerator.gpu_profiler("stop")

    def shutdown(self) -> bool:
        """Return True. The process that started this process stops it."""
        return True


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
