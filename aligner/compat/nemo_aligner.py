"""NeMo-Aligner's configuration keys that this library renames or does not use.

The tables contain keys of NeMo-Aligner's files in conf/, such as gpt_ppo_actor.yaml. Other keys
have the same name here. A row applies to its key and all keys below it. A row for ``trainer.ppo``
or ``model.ppo`` also applies to ``trainer.rs`` or ``model.rs``.
"""

import re
from typing import Any

from aligner.foreign_keys import IGNORED

# NeMo-Aligner's key → this library's key.
RENAMED = {
    "pretrained_checkpoint": "model.restore_from_path (critic.restore_from_path for the critic's)",
    "remote_rm.reward_model": "reward=server reward.server.url=http://HOST:PORT",
    "remote_critic_rm.reward_model": "reward=server reward.server.url=http://HOST:PORT",
    "remote_critic_rm.combine_rm_and_critic_server": "reward.model.share_body_with_critic",
    "trainer.ppo.combine_rm_and_critic_server": "reward.model.share_body_with_critic",
    "trainer.ppo.use_absolute_kl": "trainer.ppo.kl_estimator=abs (true), or k1 (false)",
    "trainer.ppo.inference_micro_batch_size": (
        "critic.forward_micro_batch_size, and reward.model.micro_batch_size"
    ),
    "trainer.ppo.port": "--port of examples/serve_reward_model.py (the critic is in the run)",
    "trainer.ppo.model_gbs": "model.global_batch_size",
    "trainer.ppo.model_mbs": "model.micro_batch_size",
    "trainer.ppo.trt_llm": "generation.backend=vllm, and generation.vllm.*",
    "model.ppo.trt_llm": "generation.backend=vllm, and generation.vllm.*",
    "exp_manager.exp_dir": "exp_manager.explicit_log_dir",
    "exp_manager.name": "exp_manager.explicit_log_dir, and exp_manager.wandb.name",
    "exp_manager.wandb_logger_kwargs": "exp_manager.wandb.{project,name,kwargs}",
    "exp_manager.resume_from_checkpoint": (
        "exp_manager.explicit_log_dir of the run to continue, with exp_manager.resume_if_exists"
    ),
    "exp_manager.checkpoint_callback_params.monitor": "exp_manager.monitor",
    "exp_manager.checkpoint_callback_params.save_top_k": "exp_manager.save_top_k",
    "exp_manager.checkpoint_callback_params.mode": "exp_manager.mode",
    "exp_manager.checkpoint_callback_params.save_nemo_on_train_end": "exp_manager.save_nemo",
    "model.ppo.val_rollout_micro_batch_size": "model.ppo.rollout_micro_batch_size, of both",
    "model.ppo.num_val_samples": "trainer.ppo.limit_val_prompts",
    "model.ppo.sampling_params.add_BOS": "data.add_bos",
    "model.loss_clip_val": "critic.value_clip",
    "model.dpo.ref_policy_kl_penalty": "trainer.dpo.beta",
    "model.dpo.preference_loss": "trainer.dpo.loss",
    "model.dpo.preference_loss_weight": "1 (trainer.dpo.reward_scale scales the loss of rpo)",
    "model.dpo.sft_loss_weight": "trainer.dpo.sft_weight",
    "model.dpo.preference_average_log_probs": "trainer.dpo.average_logprobs",
    "model.dpo.gt_reward_scale": "trainer.dpo.reward_scale",
    "model.dpo.log_prob_forward_micro_batch_size": "model.micro_batch_size",
    "trainer.rm": "trainer.reward_model",
    "trainer.sft.limit_val_batches": "trainer.sft.limit_val_examples",
    "trainer.dpo.limit_val_batches": "trainer.dpo.limit_val_examples",
    "model.offload_adam_states": (
        "model.ppo.offload_adam_states, or critic.offload_adam_states for the critic"
    ),
    "model.forward_micro_batch_size": (
        "model.ppo.forward_micro_batch_size, or critic.forward_micro_batch_size for the critic"
    ),
    "model.regression": "reward.attribute_weights (the file contains the number of attributes)",
    "model.hidden_dropout": "model.dropout",
    "model.attention_dropout": "model.dropout",
    "model.seed": "seed",
    "model.precision": "trainer.precision",
    "model.data": "data.train.source and data.validation.source",
    "model.peft.restore_from_ckpt": "model.peft.restore_from_path",
}
# Key that this library does not need → reason.
NEEDLESS = {
    "trainer.accelerator": "GPUs are used if present, unless ALIGNER_FORCE_CPU=1",
    "trainer.ppo.rollout_batch_seq_length": "batches are as long as their longest sequence",
    "trainer.ppo.batch_iterator": "responses of every length share the micro-batches of a rank",
    "trainer.ppo.pad_sequence_length_to_multiple": "model.dynamic_batching.sequence_length_round "
    "rounds lengths",
    "trainer.ppo.max_queue_delay_microseconds": "the critic is in the run and has no queue",
    "trainer.logger": "exp_manager.create_tensorboard_logger and create_wandb_logger replace it",
    "trainer.enable_checkpointing": "run states are saved every trainer.*.save_interval",
    "trainer.use_distributed_sampler": "the run distributes the data by its sampler",
    "remote_rm.pad_to_length": "requests are as long as their longest sequence",
    "remote_critic_rm.pad_to_length": "requests are as long as their longest sequence",
    "remote_critic_rm.critic": "the critic is in the run, with separate workers if "
    "cluster.engine=ray and cluster.colocated=false",
    "exp_manager.resume_ignore_no_checkpoint": "a directory without a run state starts a new run",
    "exp_manager.create_checkpoint_callback": "run states are saved every trainer.*.save_interval",
    "exp_manager.checkpoint_callback_params.always_save_nemo": "every run state can be loaded, and "
    "exp_manager.save_nemo writes the `.nemo` at the end",
    "exp_manager.checkpoint_callback_params.filename": "file names contain no state",
    "exp_manager.checkpoint_callback_params.model_parallel_size": "run states load in any layout",
    "model.ppo.sampling_params.all_probs": "only probabilities of sampled tokens are used",
    "model.ppo.sampling_params.compute_logprob": "log-probs of sampled tokens are always returned",
    "model.mcore_gpt": "all models are megatron-core models",
    "model.megatron_amp_O2": "trainer.precision=bf16 keeps float32 weights in the optimizer",
    "model.answer_only_loss": "only responses are learned (data.learn selects the turns)",
    "model.encoder_seq_length": "the checkpoint defines the longest sequence",
    "model.max_position_embeddings": "the checkpoint defines the longest sequence",
    "model.output_sequence": "a critic scores every token and a reward model the last token",
    "model.use_avg_pool": "a reward model reads its reward at the last token",
    "model.force_head_dtype": "heads are float32",
    "model.reward_standardization": "the reward model's file contains it, and "
    "trainer.reward_model.standardize_on measures it",
    "model.reward_model_type": "the reward model's file contains it",
    "model.peft.lora_tuning.column_init_method": "the first matrix is uniform, as in LoRA",
    "model.peft.lora_tuning.row_init_method": "the second matrix is zero, as in LoRA",
    "model.peft.lora_tuning.layer_selection": "every layer is adapted",
    "model.peft.lora_tuning.weight_tying": "every layer has separate adapters",
    "model.peft.lora_tuning.position_embedding_strategy": "it belongs to weight_tying",
    "model.optim.bucket_cap_mb": "megatron-core's distributed optimizer uses one gradient buffer",
    "model.optim.overlap_grad_sync": "gradients are summed once, after the last micro-batch",
    "model.optim.overlap_param_sync": "weights are gathered right after an update",
    "model.optim.contiguous_grad_buffer": "the gradient buffer is contiguous",
    "model.optim.contiguous_param_buffer": "the weights are gathered in one piece",
    "model.overwrite_base_config": "the architecture is the checkpoint's",
    "model.ub_tp_comm_overlap_cfg": "no communication is overlapped inside a layer",
}
# Groups whose keys are all in the tables.
_GROUPS = ("remote_rm", "remote_critic_rm", "exp_manager.checkpoint_callback_params")
# Key → values that are accepted, because this library always behaves so.
_INERT: dict[str, tuple[Any, ...]] = {
    "model.mcore_gpt": (True,),
    "model.megatron_amp_O2": (True, False),
    "model.answer_only_loss": (True,),
    "model.peft.lora_tuning.layer_selection": (None,),
    "model.peft.lora_tuning.position_embedding_strategy": (None,),
    "model.peft.lora_tuning.row_init_method": ("zero",),
    "model.peft.lora_tuning.weight_tying": (False,),
    "trainer.accelerator": ("gpu", "auto"),
    "trainer.enable_checkpointing": (False,),
    "trainer.logger": (False,),
    "trainer.use_distributed_sampler": (False,),
    "exp_manager.create_checkpoint_callback": (True,),
    "exp_manager.resume_ignore_no_checkpoint": (True,),
    "trainer.ppo.trt_llm.enable": (False,),
    "model.ppo.trt_llm.enable": (False,),
    "model.ppo.sampling_params.add_BOS": (False,),
    "model.ppo.sampling_params.all_probs": (False,),
    "model.ppo.sampling_params.compute_logprob": (False, True),
}
# Keys whose values are all ignored.
_TUNING = (
    *("remote_rm.pad_to_length", "remote_critic_rm.pad_to_length", "model.optim.bucket_cap_mb"),
    *("model.optim.overlap_grad_sync", "model.optim.overlap_param_sync"),
    *("model.optim.contiguous_grad_buffer", "model.optim.contiguous_param_buffer"),
)


def remedy(key: str) -> str | None:
    """Return what replaces a key of NeMo-Aligner, or None for an unknown key."""
    if key.startswith("critic."):  # NeMo-Aligner's configuration of the critic calls it model
        key = "model." + key.removeprefix("critic.")
    ppo_key = _ppo_key(key)
    for entry in (*RENAMED, *NEEDLESS):
        if ppo_key == entry or ppo_key.startswith(f"{entry}."):
            text = _message(entry)
            return text if ppo_key == key else text.replace(".ppo.", ".rs.")
    if key in _GROUPS:
        below = [entry for entry in (*RENAMED, *NEEDLESS) if entry.startswith(f"{key}.")]
        return "; ".join(f"{entry.removeprefix(f'{key}.')}: {_message(entry)}" for entry in below)
    return None


def is_inert(key: str, value: Any) -> bool:
    """Return whether a key with this value has no effect. Adds some of these keys to `IGNORED`."""
    if key in _TUNING:
        IGNORED[key] = None
        return True
    inert_values = _INERT.get(_ppo_key(key), ())
    return any(value == inert and type(value) is type(inert) for inert in inert_values)


def _ppo_key(key: str) -> str:
    return re.sub(r"^(trainer|model)\.rs\.", r"\1.ppo.", key)


def _message(entry: str) -> str:
    if entry in RENAMED:
        return f"NeMo-Aligner's name. Use {RENAMED[entry]}"
    return f"NeMo-Aligner's key, which is not needed here: {NEEDLESS[entry]}. Remove it"
