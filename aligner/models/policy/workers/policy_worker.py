"""One process's share of a policy, whatever it is built of."""

from collections.abc import Mapping
from typing import Any, TypeVar

from aligner.checkpoint.role_files import load_optimizer_state
from aligner.config import TrainedModelConfig
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.parallel import ParallelState
from aligner.models.gpt.role import PolicyRole
from aligner.models.megatron_worker import MegatronWorker, micro_batches_of, tensors_on_device
from aligner.models.policy.workers.refit_worker import RefitWorker

Policy = TypeVar("Policy", bound=PolicyRole)


class PolicyWorker(RefitWorker, MegatronWorker[Policy]):
    """What `Policy` asks of its workers; a backend builds the model and makes weights whole.

    Args:
        model: the policy, with the weights that ``config`` names; they are the reference's.
        parallel: this process's place.
        config: the policy's section.
        init_optimizer: False for a policy that does not learn.
        init_reference_model: whether a reference policy is kept.
        weights_path: continue from these weights.
        optimizer_path: continue from this optimizer state, a directory of `save_checkpoint`.
    """

    def __init__(
        self,
        model: Policy,
        parallel: ParallelState,
        config: TrainedModelConfig,
        *,
        init_optimizer: bool,
        init_reference_model: bool,
        weights_path: str | None,
        optimizer_path: str | None,
    ) -> None:
        super().__init__(model, parallel)
        rollout = config.rollout
        model.configure_generation(
            rollout.length_params, rollout.sampling_params, rollout.rollout_micro_batch_size
        )
        if init_reference_model:
            model.keep_reference(config.reference_mode)
        if weights_path is not None:
            self.load_checkpoint(weights_path)
        if init_optimizer:
            model.setup_training()
        if optimizer_path is not None:
            load_optimizer_state(self, optimizer_path)

    def generate(self, data: Mapping[str, Any], seed: int, greedy: bool = False) -> BatchedDataDict:
        """Continue right-padded prompts; see `GenerationOutputSpec`."""
        batch = tensors_on_device(data)
        output = self.model.generate(
            batch["input_ids"],
            batch["input_lengths"],
            batch["sample_ids"],
            seed=seed,
            greedy=greedy or None,
        )
        return BatchedDataDict(
            {
                "output_ids": output.tokens,
                "generation_lengths": output.lengths - output.prompt_lengths,
                "unpadded_sequence_lengths": output.lengths,
                "logprobs": output.logprobs,
                "is_end": output.is_end,
            }
        )

    def get_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """``logprobs`` float32 ``[B, S]`` under the current weights."""
        passes = micro_batches_of(data, micro_batch_size)
        return BatchedDataDict(
            {"logprobs": self.model.get_logprobs(tensors_on_device(data), passes)}
        )

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """``reference_logprobs`` float32 ``[B, S]`` under the initial weights."""
        passes = micro_batches_of(data, micro_batch_size)
        logprobs = self.model.get_reference_logprobs(tensors_on_device(data), passes)
        return BatchedDataDict({"reference_logprobs": logprobs})

    def prepare_for_generation(self) -> None:
        """Evaluation mode."""
        self.model.prepare_for_inference()

    def finish_generation(self) -> None:
        """Release what generation cached."""
        self.model.finish_inference()

    def prepare_for_lp_inference(self) -> None:
        """Evaluation mode."""
        self.model.prepare_for_inference()
