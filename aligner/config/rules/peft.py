"""Checks of adapters against the model and its backend."""

from aligner.config.roles.model import TrainedModelConfig
from aligner.errors import ConfigError


def check_peft(backend: str, model: TrainedModelConfig) -> None:
    """Refuse adapters where there are none, and settings of adapters without them."""
    peft = model.peft
    if peft.lora is None:
        if peft.restore_from_path is not None:
            raise ConfigError(
                f"model.peft.restore_from_path={peft.restore_from_path} names adapters, and "
                "model.peft.peft_scheme is null; set it to lora"
            )
        return
    if backend != "megatron":
        raise ConfigError(
            f"policy.backend={backend} trains all weights, and model.peft.peft_scheme=lora; set "
            "policy.backend=megatron, or model.peft.peft_scheme=null"
        )
    if not peft.lora.target_modules:
        raise ConfigError(
            "model.peft.lora_tuning.target_modules is empty, so nothing would be trained; give "
            "all, or some of attention_qkv, attention_dense, mlp_fc1 and mlp_fc2"
        )
    if peft.lora.adapter_dropout and model.activations_checkpoint_granularity == "full":
        raise ConfigError(
            f"model.peft.lora_tuning.adapter_dropout={peft.lora.adapter_dropout:g}: layers that "
            "are computed again (model.activations_checkpoint_granularity=full) no longer know "
            "their tokens; set it to 0, or activations_checkpoint_granularity to selective or null"
        )
    if model.fp8 is not None:
        raise ConfigError(
            f"model.fp8={model.fp8}: adapters sit on megatron-core's own linears, and 8-bit "
            "products are Transformer Engine's; set model.fp8=null, or "
            "model.peft.peft_scheme=null"
        )
    if model.layer_spec == "transformer_engine":
        raise ConfigError(
            "model.layer_spec=transformer_engine: adapters sit on megatron-core's own linears; set "
            "model.layer_spec=auto, or model.peft.peft_scheme=null"
        )
