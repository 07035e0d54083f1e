"""Sections of NeMo-RL's configurations, written from the keys and values that they have."""

import pytest
import yaml

from aligner.config.translation.nemo_rl import published_role, read_role
from aligner.errors import ConfigError

# One section of a policy, with the keys and values of a published configuration.
SECTION = """
model_name: Qwen/Qwen2.5-1.5B
tokenizer: {name: Qwen/Qwen2.5-1.5B, chat_template_kwargs: null}
hf_config_overrides: {}
train_global_batch_size: 512
train_micro_batch_size: 4
generation_batch_size: 32
logprob_batch_size: 4
max_total_sequence_length: 512
precision: bfloat16
offload_optimizer_for_logprob: false
draft: {enabled: false, loss_weight: 0.1, model_name: null}
dtensor_cfg:
  {_v2: true, enabled: false, cpu_offload: false, sequence_parallel: false,
   activation_checkpointing: false, tensor_parallel_size: 1, context_parallel_size: 1,
   custom_parallel_plan: null, automodel_kwargs: {}, lora_cfg: {enabled: false, dim: 8, alpha: 32,
     target_modules: [], exclude_modules: [], match_all_linear: true, dropout: 0, use_triton: true}}
megatron_cfg:
  {enabled: false, env_vars: null, activation_checkpointing: false, recompute_granularity: full,
   recompute_modules: null, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1,
   context_parallel_size: 1, expert_model_parallel_size: 1, expert_tensor_parallel_size: 1,
   sequence_parallel: false, num_layers_in_first_pipeline_stage: null, freeze_moe_router: true,
   moe_router_dtype: fp64, moe_router_load_balancing_type: none, moe_router_bias_update_rate: 0.0,
   moe_permute_fusion: true, apply_rope_fusion: true, cuda_graph_impl: none, cuda_graph_modules: [],
   mtp_num_layers: 0, model_overrides: {}, use_gloo_process_groups: false,
   checkpoint: {async_save: true}, fp8_cfg: {enabled: false, fp8: e4m3, fp8_recipe: blockwise},
   peft: {enabled: false, dim: 8, exclude_modules: [], lora_dtype: None},
   optimizer: {optimizer: adam, lr: 5.0e-6, min_lr: 5.0e-7, weight_decay: 0.01, bf16: true,
     fp16: false, adam_beta1: 0.9, adam_beta2: 0.999, clip_grad: 1.0},
   scheduler: {start_weight_decay: 0.01, lr_decay_style: constant, lr_decay_iters: 1000,
     lr_warmup_iters: 13, lr_warmup_init: 5.0e-7},
   distributed_data_parallel_config: {overlap_grad_reduce: true}}
dynamic_batching: {enabled: false, train_mb_tokens: 2048}
sequence_packing:
  {enabled: true, train_mb_tokens: 2048, logprob_mb_tokens: 2048, algorithm: modified_ffd,
   microbatch_order: packer, sequence_length_round: 64}
make_sequence_length_divisible_by: 1
max_grad_norm: 1.0
optimizer:
  {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01, foreach: false, fused: false}}
scheduler:
  - {name: torch.optim.lr_scheduler.LinearLR,
     kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
  - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
  - {milestones: [50]}
generation:
  {backend: vllm, max_new_tokens: 512, temperature: 1.0, top_p: 1.0, top_k: null,
   stop_token_ids: null, stop_strings: null, val_temperature: 1.0, val_top_k: null,
   port_range_low: 3000, mcore_generation_config: {max_tokens: 16384},
   vllm_cfg: {async_engine: false, tensor_parallel_size: 1}, refit_transport: null,
   colocated: {enabled: true, resources: {num_nodes: null}}, real_quant_export_cpu_offload: true}
"""
WARM_UP = yaml.safe_load(SECTION)["scheduler"]


def section(backend="dtensor", **changes):
    values = yaml.safe_load(SECTION)
    values[f"{backend}_cfg"]["enabled"] = True
    for path, value in changes.items():
        *names, key = path.split("__")
        place = values
        for name in names:
            place = place[name]
        place[key] = value
    return values


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fsdp_offload_enabled": False, "activation_checkpointing_enabled": False},
        {"hf_config_overrides": {"router_aux_loss_coef": 0.0}},
        {"generation__vllm_kwargs": {"speculative_config": {"method": "mtp"}}},
        {"generation__backend": "sglang", "generation__sglang_cfg": {"dtype": "bfloat16"}},
        {"router_replay": {"enabled": False}},
        {"sequence_packing": {"enabled": False}, "dynamic_batching__enabled": True},
    ],
)
def test_what_is_switched_off_or_tunes_engines_says_nothing(backend, changes):
    with pytest.warns(UserWarning, match="keys without effect here: ") as seen:
        role = published_role(section(backend, **changes))
    assert len(seen) == 1
    assert role.backend == backend
    assert role.model.optim.lr == 5e-6
    assert role.model.optim.sched.warmup_steps == {"megatron": 13, "dtensor": 50}[backend]


def test_a_backend_that_is_not_enabled_is_not_read():
    of_dtensor, _ = read_role(section("dtensor", megatron_cfg__mtp_num_layers=2, megatron_cfg__x=1))
    of_megatron, _ = read_role(section("megatron", dtensor_cfg__context_parallel_size=8))
    assert (of_dtensor.backend, of_megatron.backend) == ("dtensor", "megatron")


@pytest.mark.parametrize(
    ("backend", "changes", "key"),
    [
        ("dtensor", {"dtensor_cfg__lora_cfg__enabled": True}, "lora_cfg"),
        ("dtensor", {"dtensor_cfg__expert_parallel_size": 8}, "expert_parallel_size"),
        ("dtensor", {"dtensor_cfg__context_parallel_size": 2}, "context_parallel_size"),
        ("dtensor", {"optimizer__name": "torch.optim.Adagrad"}, "optimizer.name"),
        ("megatron", {"megatron_cfg__fp8_cfg": {"enabled": True, "fp8_param": True}}, "fp8_param"),
        ("megatron", {"megatron_cfg__expert_model_parallel_size": 8,
                      "megatron_cfg__moe_router_load_balancing_type": "aux_loss"}, "balancing"),
        ("megatron", {"reward_model_cfg": {"enabled": True}}, "reward_model_cfg"),
        ("megatron", {"megatron_cfg__mtp_num_layers": 2}, "mtp_num_layers"),
        ("megatron", {"megatron_cfg__peft__enabled": True, "megatron_cfg__peft__exclude_modules":
                      ["*linear_qkv*"]}, "exclude_modules"),
        ("megatron", {"draft": {"enabled": True}}, "policy.draft"),
        ("megatron", {"generation__bad_words": ["<img>"]}, "bad_words"),
        ("megatron", {"generation__temperatur": 0}, "Did you mean policy.generation.temperature"),
        ("megatron", {"quant_cfg": "nvfp4.yaml"}, "quant_cfg"),
        ("megatron", {"megatron_cfg__tensor_parallel_size": 2}, "unknown key.*mean .*model_par"),
        ("megatron", {"hf_config_overrides": {"rope_theta": 1}}, "Edit its config.json"),
        ("megatron", {"fsdp_offload_enabled": True}, "fsdp_offload_enabled"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(backend, changes, key):
    with pytest.raises(ConfigError, match=key) as refused:
        published_role(section(backend, **changes))
    assert len(str(refused.value).splitlines()) == 3  # of one setting: a head, titles and its row


def test_one_backend_is_enabled():
    with pytest.raises(ConfigError, match="neither is true"):
        published_role(section("megatron", megatron_cfg__enabled=False))
    with pytest.raises(ConfigError, match="both are true"):
        published_role(section("megatron", dtensor_cfg__enabled=True))


def test_all_refusals_are_one_table():
    values = section(
        "megatron",
        train_micro_batch_size=0,
        megatron_cfg__num_layers_in_first_pipeline_stage=0,
        megatron_cfg__tensor_parallel_size=2,
        precision="float16",
        model_name=None,
    )
    with pytest.raises(ConfigError) as refused:
        published_role(values)
    head, titles, *rows = str(refused.value).splitlines()
    assert head == "policy: these settings are not supported"
    assert titles.split("  ")[1] == "their key"
    assert [row.split()[:2] for row in rows] == [
        ["policy.model_name", "null"],
        ["policy.train_micro_batch_size", "0"],
        ["policy.precision", "float16"],
        ["policy.megatron_cfg.num_layers_in_first_pipeline_stage", "0"],
        ["policy.megatron_cfg.tensor_parallel_size", "2"],
    ]


def test_keys_of_experts_are_neutral_for_a_dense_model_only():
    balanced = {"megatron_cfg__moe_router_load_balancing_type": "aux_loss"}
    role, _ = read_role(section("megatron", **balanced))
    role.check_experts(None)
    with pytest.raises(ConfigError, match=r"has 8 experts.*\n.*\n.*load_balancing_type +aux_loss"):
        role.check_experts(8)
    role, _ = read_role(section("megatron"))
    role.check_experts(8)


@pytest.mark.parametrize(
    ("enabled", "rate", "moves"), [(True, 0.001, True), (True, 0.0, False), (False, 0.001, False)]
)
def test_a_bias_of_experts_is_moved_if_it_is_enabled_and_has_a_rate(enabled, rate, moves):
    values = section("megatron", megatron_cfg__expert_model_parallel_size=8)
    values["megatron_cfg"]["moe_router_enable_expert_bias"] = enabled
    values["megatron_cfg"]["moe_router_bias_update_rate"] = rate
    _, notes = read_role(values)
    assert [row[0].rsplit("_", 2)[-1] for row in notes.refused] == ["rate", "bias"] * moves


def test_what_a_megatron_section_says_of_its_model_is_done():
    values = section(
        "megatron",
        megatron_cfg__expert_model_parallel_size=8,
        megatron_cfg__pipeline_model_parallel_size=8,
        megatron_cfg__num_layers_in_first_pipeline_stage=7,
        megatron_cfg__num_layers_in_last_pipeline_stage=6,
        megatron_cfg__fp8_cfg__enabled=True,
        megatron_cfg__activation_checkpointing=True,
        megatron_cfg__peft={"enabled": True, "dim": 4, "exclude_modules": ["*out_proj*"]},
    )
    role, notes = read_role(values)
    model = role.model
    assert (model.freeze_moe_router, model.fp8) == (True, "e4m3")
    assert "policy.megatron_cfg.fp8_cfg.fp8_recipe" in notes.ignored
    assert (model.parallel.first_stage, model.parallel.last_stage) == (7, 6)
    assert (model.activations_checkpoint_granularity, model.peft.lora.adapter_dim) == ("full", 4)
    assert role.critic.optim == model.optim
    assert model.optim.betas == (0.9, 0.999)


def test_layouts_of_dtensors_that_change_no_number_are_named():
    values = section(dtensor_cfg__sequence_parallel=True, dtensor_cfg__dp_replicate_size=2)
    role, notes = read_role(values)
    assert role.model.parallel.sequence_parallel is False
    assert {f"policy.dtensor_cfg.{key}" for key in ("sequence_parallel", "dp_replicate_size")} <= {
        *notes.ignored
    }


LINEAR, CONSTANT, COSINE = (f"torch.optim.lr_scheduler.{n}LR" for n in (
    "Linear", "Constant", "CosineAnnealing"))  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (WARM_UP, ("constant", 50, None, 0.0)),
        (None, ("constant", 0, None, 0.0)),
        ([{"name": CONSTANT, "kwargs": {"factor": 1.0}}, {"milestones": []}],
         ("constant", 0, None, 0.0)),
        ({"name": LINEAR, "kwargs": {"start_factor": 1, "end_factor": 1}},
         ("constant", 0, None, 0.0)),
        ([{"name": LINEAR, "kwargs": {"start_factor": 0.02, "end_factor": 1, "total_iters": 250}},
          {"name": COSINE, "kwargs": {"T_max": 4750, "eta_min": 1e-7}}, {"milestones": [250]}],
         ("cosine", 250, 5000, 1e-7)),
        ([{"name": LINEAR, "kwargs": {"start_factor": 1, "end_factor": 0.1, "total_iters": 90}}],
         ("linear", 0, 90, 5e-7)),
    ],
)  # fmt: skip
def test_schedules_are_translated(entries, expected):
    role, _ = read_role(section(scheduler=entries))
    sched = role.model.optim.sched
    assert (sched.name, sched.warmup_steps, sched.max_steps) == expected[:3]
    assert sched.min_lr == pytest.approx(expected[3])


@pytest.mark.parametrize(
    "entries",
    [
        [{"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 3}}],
        [{"name": CONSTANT, "kwargs": {"factor": 0.5, "total_iters": 100}}],
        [*WARM_UP[:2], {"milestones": [20]}],
    ],
)
def test_a_schedule_without_a_counterpart_is_refused(entries):
    with pytest.raises(ConfigError, match=r"policy\.scheduler "):
        published_role(section(scheduler=entries))
