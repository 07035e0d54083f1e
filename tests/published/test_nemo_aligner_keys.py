"""NeMo-Aligner's configuration keys and default values: accepted, or refused with what to use.

The keys are those of its three main configurations (gpt_ppo_actor, gpt_ppo_critic, gpt_rs_actor).
"""

import pytest

from aligner.compat.nemo_aligner import NEEDLESS, RENAMED, is_inert
from aligner.config import (
    CriticConfig,
    ExpManagerConfig,
    ModelConfig,
    OptimConfig,
    RSRunConfig,
    RunConfig,
    TrainedModelConfig,
)
from aligner.config.algorithms.process import ProcessConfig
from aligner.config.cli import check_overrides
from aligner.config.parse import build
from aligner.config.run import DPORunConfig, RewardRunConfig, SFTRunConfig
from aligner.errors import ConfigError

TRAINER = """
num_nodes devices accelerator precision logger enable_checkpointing use_distributed_sampler
max_time max_epochs max_steps
"""
LOOP = """
max_epochs max_steps val_check_interval save_interval gradient_clip_val model_gbs model_mbs
rollout_batch_seq_length
"""
PPO_LOOP = """
critic_warmup_steps initial_policy_kl_penalty use_absolute_kl discount_factor gae_lambda
normalize_advantages trt_llm.enable trt_llm.reshard trt_llm.max_input_len trt_llm.max_input_tokens
trt_llm.seed trt_llm.model_type trt_llm.unload_engine_train batch_iterator.use_flask
batch_iterator.port
"""
CRITIC_LOOP = """
port combine_rm_and_critic_server max_steps gradient_clip_val pad_sequence_length_to_multiple
max_queue_delay_microseconds inference_micro_batch_size
"""
EXP_MANAGER = """
explicit_log_dir exp_dir name create_wandb_logger wandb_logger_kwargs.project
wandb_logger_kwargs.name resume_from_checkpoint resume_if_exists resume_ignore_no_checkpoint
create_checkpoint_callback checkpoint_callback_params.monitor checkpoint_callback_params.save_top_k
checkpoint_callback_params.mode checkpoint_callback_params.always_save_nemo
checkpoint_callback_params.save_nemo_on_train_end checkpoint_callback_params.filename
checkpoint_callback_params.model_parallel_size
"""
ROLLOUT = """
rollout_micro_batch_size num_rollout_samples forward_micro_batch_size val_rollout_micro_batch_size
num_val_samples offload_adam_states sampling_params.use_greedy sampling_params.temperature
sampling_params.top_k sampling_params.top_p sampling_params.repetition_penalty
sampling_params.add_BOS sampling_params.all_probs sampling_params.compute_logprob
sampling_params.end_strings length_params.max_length length_params.min_length
"""
PEFT = """
peft_scheme restore_from_path restore_from_ckpt.checkpoint_dir restore_from_ckpt.checkpoint_name
lora_tuning.target_modules lora_tuning.adapter_dim lora_tuning.adapter_dropout
lora_tuning.column_init_method lora_tuning.row_init_method lora_tuning.layer_selection
lora_tuning.weight_tying lora_tuning.position_embedding_strategy
"""
MODEL = """
megatron_amp_O2 micro_batch_size global_batch_size encoder_seq_length max_position_embeddings seed
precision optim.name optim.bucket_cap_mb optim.overlap_grad_sync optim.contiguous_grad_buffer
optim.lr optim.weight_decay optim.betas optim.sched.name optim.sched.warmup_steps
optim.sched.constant_steps optim.sched.min_lr
"""
ACTOR = """
mcore_gpt sequence_parallel optim.overlap_param_sync data.data_impl data.splits_string
data.seq_length data.skip_warmup data.num_workers data.dataloader_type data.reset_position_ids
data.reset_attention_mask data.eod_mask_loss data.index_mapping_dir data.data_prefix
overwrite_base_config.data.data_prefix
"""
CRITIC = """
loss_clip_val offload_adam_states output_sequence reward_standardization.enable
reward_standardization.mean reward_standardization.std forward_micro_batch_size use_avg_pool
force_head_dtype reward_model_type regression.num_attributes regression.merge_attributes
regression.attribute_weights
"""
REMOTE_RM = "pad_to_length reward_model.name reward_model.ip reward_model.port"
REMOTE_CRITIC = """
combine_rm_and_critic_server critic.name.train critic.name.infer critic.name.save critic.ip
critic.port
"""


def below(prefix, *lists):
    return [f"{prefix}.{key}" for names in lists for key in names.split()]


COMMON = [
    *below("trainer", TRAINER),
    *below("exp_manager", EXP_MANAGER),
    "pretrained_checkpoint.restore_from_path",
    *below("model", MODEL),
]
CONFIGURATIONS = {
    "gpt_ppo_actor": (
        RunConfig,
        [
            *COMMON,
            *below("trainer.ppo", LOOP, PPO_LOOP),
            *below("remote_critic_rm", REMOTE_RM, REMOTE_CRITIC),
            *below("model.ppo", ROLLOUT, "entropy_bonus ratio_eps trt_llm"),
            *below("model.peft", PEFT),
            *below("model", ACTOR),
        ],
    ),
    "gpt_ppo_critic": (
        RunConfig,
        [*COMMON, *below("trainer.ppo", CRITIC_LOOP), *below("model", CRITIC)],
    ),
    "gpt_rs_actor": (
        RSRunConfig,
        [
            *COMMON,
            *below("trainer.rs", LOOP),
            *below("remote_rm", REMOTE_RM),
            *below("model.rs", ROLLOUT, "num_rollouts_per_prompt top_n_rollouts"),
            *below("model.peft", PEFT),
            *below("model", ACTOR),
        ],
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_key_is_accepted_or_refused_with_what_to_use(name):
    root, keys = CONFIGURATIONS[name]
    accepted, bad = 0, []
    for key in keys:
        try:
            check_overrides([f"{key}=1"], root)
            accepted += 1
        except ConfigError as error:
            names_ours = "NeMo-Aligner" in str(error) or "Did you mean trainer." in str(error)
            if not names_ours or not str(error).startswith(key):
                bad.append(str(error))
    assert bad == []
    assert accepted > (15 if name == "gpt_ppo_critic" else 35)


def test_what_is_refused_is_no_key_of_ours():
    """An entry that a dataclass has in the meantime would never be read."""
    for key in (*RENAMED, *NEEDLESS):
        for root in (RunConfig, RSRunConfig):
            if not is_inert(key, 1):
                with pytest.raises(ConfigError):
                    check_overrides([f"{key}=1"], root)


def test_the_keys_that_are_named_instead_exist():
    words = {"critic.value_clip", "model.global_batch_size", "generation.backend", "data.add_bos"}
    for said in [*RENAMED.values(), *NEEDLESS.values()]:
        for word in said.replace(",", " ").replace(";", " ").split():
            key = word.split("=")[0]
            if key.split(".")[0] in ("model", "critic", "trainer", "data", "exp_manager", "reward"):
                words.add(key.removesuffix(".*"))
    for key in sorted(words):
        if not any(mark in key for mark in "{*") and not key.startswith("trainer.reward_model"):
            roots = {".rs.": RSRunConfig, ".dpo.": DPORunConfig, ".sft.": SFTRunConfig}
            roots["data.learn"] = SFTRunConfig
            root = next((roots[name] for name in roots if name in key), RunConfig)
            check_overrides([f"{key}=1"], root)


def test_their_values_are_read():
    optim = {"lr": 9e-7, "betas": [0.9, 0.98]}
    cosine = {"warmup_steps": 10, "constant_steps": 1000, "min_lr": 9e-8}
    ours = build(OptimConfig, {**optim, "name": "adam", "sched": {**cosine, "name": "cosine"}})
    theirs = {**optim, "sched": {**cosine, "name": "CosineAnnealing"}}
    for name in ("distributed_fused_adam", "mcore_distributed_optim", "fused_adam"):
        assert build(OptimConfig, {**theirs, "name": name}) == ours
    with pytest.raises(ConfigError, match="must be one of constant, cosine, linear"):
        build(OptimConfig, {"sched": {"name": "WarmupAnnealing"}})
    values = {"restore_from_path": "m.nemo", "peft": {"peft_scheme": "none"}}
    assert build(TrainedModelConfig, values).peft.lora is None
    precisions = {32: "32", "32-true": "32", "bf16-mixed": "bf16", "bf16-true": "bf16"}
    for given, precision in precisions.items():
        assert build(ProcessConfig, {"precision": given}).precision == precision
    for given in (16, "16-mixed"):
        with pytest.raises(ConfigError, match=r"trainer.precision=16.*loss scaling.*bf16"):
            build(ProcessConfig, {"precision": given}, "trainer")


def test_only_their_groups_are_called_theirs():
    with pytest.raises(ConfigError) as caught:
        build(ExpManagerConfig, {"checkpoint_callback_params": {"mode": "max"}}, "exp_manager")
    assert "mode: NeMo-Aligner's name. Use exp_manager.mode" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        check_overrides(["model.rs.top_n_rollouts=1"], RunConfig)
    assert "NeMo-Aligner" not in str(caught.value)


def test_their_defaults_of_a_model_section_are_accepted():
    """What a mapping of theirs asks for that is so anyway."""
    model = {
        **{"restore_from_path": "m.nemo", "mcore_gpt": True, "megatron_amp_O2": True},
        "ppo": {"sampling_params": {"add_BOS": False, "all_probs": False}},
        "optim": {"name": "distributed_fused_adam", "bucket_cap_mb": 200},
    }
    assert build(ModelConfig, model, "model").optim.name == "adam"
    model["ppo"]["sampling_params"]["add_BOS"] = True
    with pytest.raises(ConfigError, match=r"data\.add_bos"):
        build(ModelConfig, model, "model")
    with pytest.raises(ConfigError, match=r"critic\.value_clip"):
        build(CriticConfig, {"loss_clip_val": 0.2}, "critic")


# What its documentation's commands set: of the PPO actor, rejection sampling, SFT, DPO and reward.
COMMANDS = {
    "ppo": (
        RunConfig,
        """trainer.devices=8 trainer.num_nodes=1 trainer.accelerator=gpu
        pretrained_checkpoint.restore_from_path=m.nemo model.mcore_gpt=True
        model.megatron_amp_O2=True exp_manager.create_wandb_logger=False
        exp_manager.explicit_log_dir=r exp_manager.checkpoint_callback_params.save_top_k=80
        trainer.ppo.max_epochs=1 trainer.ppo.initial_policy_kl_penalty=0.02
        ++model.ppo.entropy_bonus=0.0 model.ppo.num_rollout_samples=512
        model.ppo.rollout_micro_batch_size=8 model.ppo.length_params.max_length=1024
        remote_critic_rm.pad_to_length=2048 remote_critic_rm.critic.ip=h
        model.global_batch_size=64 model.optim.lr=9e-7 trainer.ppo.trt_llm.enable=False""",
        """pretrained_checkpoint.restore_from_path remote_critic_rm.critic.ip
        exp_manager.checkpoint_callback_params.save_top_k""",
    ),
    "rs": (
        RSRunConfig,
        """trainer.rs.max_epochs=1 model.rs.num_rollouts_per_prompt=4 model.rs.top_n_rollouts=1
        ++model.mcore_gpt=True model.peft.lora_tuning.layer_selection=null
        model.peft.lora_tuning.weight_tying=False trainer.rs.trt_llm.enable=false
        remote_rm.reward_model.ip=h model.data.data_impl=jsonl""",
        "remote_rm.reward_model.ip model.data.data_impl",
    ),
    "sft": (
        SFTRunConfig,
        """trainer.precision=bf16 trainer.sft.max_steps=-1 trainer.sft.limit_val_batches=40
        model.megatron_amp_O2=True model.restore_from_path=m.nemo model.optim.lr=5e-6
        model.answer_only_loss=True model.data.train_ds.file_path=d.jsonl
        exp_manager.resume_ignore_no_checkpoint=True""",
        "trainer.sft.limit_val_batches model.data.train_ds.file_path",
    ),
    "dpo": (
        DPORunConfig,
        """model.dpo.ref_policy_kl_penalty=0.1 model.dpo.preference_loss=ipo trainer.dpo.max_steps=9
        model.dpo.log_prob_forward_micro_batch_size=1 trainer.enable_checkpointing=False""",
        """model.dpo.ref_policy_kl_penalty model.dpo.preference_loss
        model.dpo.log_prob_forward_micro_batch_size""",
    ),
    "reward": (
        RewardRunConfig,
        """trainer.rm.max_epochs=1 trainer.rm.val_check_interval=10 ++model.output_sequence=False
        ++model.reward_model_type=binary_ranking model.global_batch_size=512""",
        """trainer.rm.max_epochs trainer.rm.val_check_interval model.output_sequence
        model.reward_model_type""",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_of_a_documented_command_are_checked_in_one_go(name):
    root, flags, refused = COMMANDS[name]
    with pytest.raises(ConfigError) as error:
        check_overrides(flags.split(), root)
    head, titles, *rows = str(error.value).splitlines()
    assert head == f"{len(rows)} arguments cannot be used"
    assert titles.split() == ["their", "key", "value", "what", "to", "use"]
    assert {row.split()[0] for row in rows} == set(refused.split())
    assert all("NeMo-Aligner" in row for row in rows)
    kept = [flag for flag in flags.split() if flag.split("=")[0].lstrip("+") not in refused.split()]
    given = [flag.lstrip("+") for flag in kept if "True" not in flag]
    assert set(check_overrides(kept, root)) <= {f"++{flag}" for flag in given}


def test_what_is_done_anyway_is_accepted_and_its_opposite_is_not():
    inert = [
        *("++model.mcore_gpt=True", "trainer.accelerator=gpu", "trainer.ppo.trt_llm.enable=False"),
        *(
            "model.peft.lora_tuning.layer_selection=null",
            "model.peft.lora_tuning.weight_tying=False",
        ),
    ]
    assert check_overrides(inert, RunConfig) == []
    assert check_overrides(["trainer.rs.trt_llm.enable=false"], RSRunConfig) == []
    for other in ("model.mcore_gpt=False", "trainer.accelerator=cpu", "trainer.logger=True"):
        with pytest.raises(ConfigError, match="NeMo-Aligner's key"):
            check_overrides([other], RunConfig)
