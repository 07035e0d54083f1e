"""One process's share of a policy on megatron-core."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from aligner.checkpoint.gathered_weights import GatheredWeights
from aligner.checkpoint.hf_families import config_to_hf
from aligner.checkpoint.hf_tensors import HuggingFaceView
from aligner.config import ModelConfig
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.parallel import ParallelState
from aligner.models.gpt import load_from_nemo
from aligner.models.gpt.actor import MegatronGPTActorModel
from aligner.models.gpt.settings import RunFacts, policy_settings
from aligner.models.megatron_worker import MegatronWorker, micro_batches_of, tensors_on_device
from aligner.models.policy.workers.refit_worker import RefitWorker


class MegatronPolicyWorker(RefitWorker, MegatronWorker[MegatronGPTActorModel]):
    """Loads the policy from ``config.restore_from_path`` and serves `Policy`."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        run: RunFacts,
        parallel: ParallelState,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        max_optimizer_steps: int | None = None,
    ) -> None:
        model = load_from_nemo(
            MegatronGPTActorModel,
            policy_settings(config, run, max_optimizer_steps),
            restore_path=config.restore_from_path,
            tokenizer=tokenizer,
        )
        super().__init__(model, parallel)
        model.configure_generation(
            config.ppo.length_params,
            config.ppo.sampling_params,
            config.ppo.rollout_micro_batch_size,
        )
        if init_reference_model:
            model.keep_reference(config.reference.mode)
        if init_optimizer:
            model.setup_training()

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

    # Weights for sampling engines -------------------------------------------------------------

    def hf_weight_names(self) -> Sequence[str]:
        """Names of all weights, as in a Hugging Face state dict, in depth order."""
        return list(self._hugging_face_view())

    def hf_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors on every worker; collective over tensor, pipeline and expert parallel."""
        view = self._hugging_face_view()
        return ((name, view[name]) for name in names)

    def _hugging_face_view(self) -> HuggingFaceView:
        architecture = self.model.architecture
        family, _ = config_to_hf(architecture)
        return HuggingFaceView(self._gathered_weights, family.table, architecture)

    @cached_property
    def _gathered_weights(self) -> GatheredWeights:
        return GatheredWeights(
            self.model.gpt,
            self.model.architecture,
            tp_group=self.parallel.tp_group,
            pp_group=self.parallel.pp_group,
            ep_group=self.parallel.ep_group,
        )
