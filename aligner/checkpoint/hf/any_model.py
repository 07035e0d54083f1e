"""Hugging Face directories of models that transformers can build, but megatron-core cannot.

Weights have their names in the transformers module, which may differ from those in files.
"""

import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from aligner.architecture import GPTArchitecture, TransformersArchitecture
from aligner.checkpoint.canonical import REWARD_HEAD, LazyTensors, Shape, Weights, misfits
from aligner.checkpoint.hf.families import config_to_hf
from aligner.checkpoint.hf.model_folder import new_folder, read_json, read_tokenizer_files
from aligner.checkpoint.nemo.config import Config, config_from_architecture
from aligner.data.tokenizers.loading import tokenizer_from_files
from aligner.data.tokenizers.tokenizer import GENERATION_CONFIG, Tokenizer
from aligner.errors import CheckpointError, ConfigError, raised_as

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HEAD_FILE = "value_head.safetensors"  # head of a critic or reward model, and its NeMo keys
_HEAD = ("score.weight", "score.bias")  # names in the module
# Parts of the names of settings for dropout and noise.
_RANDOM = ("dropout", "pdrop", "layerdrop", "drop_prob", "jitter")
# Names of a size in configurations, by the field of `GPTArchitecture`.
_SIZES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "d_model", "n_embd", "dim"),
    "ffn_hidden_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "dff"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_query_groups": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "kv_channels": ("head_dim",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
}
_UNLIMITED = 2**31  # positions of a model without a limit


@dataclass(frozen=True)
class TransformersSource:
    """Hugging Face directory of a decoder-only model that transformers can load."""

    folder: Path
    architecture: TransformersArchitecture
    tokenizer_files: dict[str, bytes]

    @property
    def config(self) -> Config:
        """Model sizes, and settings of a reward model, under the keys of NeMo's configuration."""
        keys = json.loads(self.head[1].get("keys", "{}"))
        return {**config_from_architecture(self.architecture), **keys}

    @cached_property
    def head(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Canonical name → tensor of `HEAD_FILE`, and its metadata. Both empty without the file."""
        file = self.folder / HEAD_FILE
        if not file.is_file():
            return {}, {}
        with safe_open(file, framework="pt") as head:
            return {name: head.get_tensor(name) for name in head.keys()}, head.metadata() or {}  # noqa: SIM118

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer built from ``tokenizer_files``."""
        return tokenizer_from_files(self.tokenizer_files)

    @cached_property
    def weights(self) -> "LoadedWeights":
        """Weights by their names in the module. The first access loads all of them."""
        return LoadedWeights(self)


class LoadedWeights(Mapping[str, Tensor]):
    """Float32 parameters and persistent buffers of a directory, loaded at the first access."""

    def __init__(self, source: TransformersSource) -> None:
        self._source = source

    @cached_property
    def model(self) -> "PreTrainedModel":
        """Model in evaluation mode. Raises `CheckpointError` for damaged or missing files."""
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        folder = self._source.folder
        with raised_as(CheckpointError, f"transformers cannot load {str(folder)!r}"):
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=model_config(self._source.architecture),
                trust_remote_code=bool(self._source.architecture.code),
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
            )
        # A critic has a separate head, and no output layer after the body.
        missing = set(report["missing_keys"])
        needed = missing
        if self._source.head[0]:
            needed = {name for name in missing if name.startswith(f"{body_path(model)}.")}
        name_problems = misfits(set(report["unexpected_keys"]), needed, set())
        others = sorted(map(str, (*report["mismatched_keys"], *report["error_msgs"])))
        problems = "; ".join(filter(None, [name_problems, *others]))
        if problems:
            raise CheckpointError(
                f"weights in {str(folder)!r} do not fit its config.json: {problems}. Add the "
                "missing files, or correct config.json"
            )
        self._missing = missing
        return model.eval()

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        tensors = dict(self.model.state_dict())
        for name in self._missing:
            tensors.pop(name, None)
        if head := self._source.head[0]:
            tensors |= {name: head[key] for name, key in zip(_HEAD, REWARD_HEAD, strict=True)}
        return tensors

    def __contains__(self, name: object) -> bool:  # loads nothing for the name of a head
        return name in (self._source.head[0] if name in REWARD_HEAD else self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        return (self._source.head[0] if name in REWARD_HEAD else self._tensors)[name]


def read_any(folder: Path, *, trusted: bool = False) -> TransformersSource:
    """Read the configuration and the tokenizer of a Hugging Face directory, not the weights.

    ``trusted``: allow Python code in the directory to build the model. Raises `CheckpointError` if
    the model is not supported, or if its vocabulary is smaller than the tokenizer's.
    """
    settings = read_json(folder / "config.json")
    architecture = architecture_of(settings, str(folder), trusted=trusted)
    source = TransformersSource(folder, architecture, read_tokenizer_files(folder, settings))
    has_tokenizer = source.tokenizer_files.keys() - {GENERATION_CONFIG}
    size = source.tokenizer.vocab_size if has_tokenizer else 0
    if size > architecture.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {str(folder)!r} has {size} tokens, but vocab_size="
            f"{architecture.vocab_size} in config.json. Copy this model's own tokenizer files to "
            "the directory"
        )
    return source


def architecture_of(
    settings: Mapping[str, Any], origin: str, *, trusted: bool = False
) -> TransformersArchitecture:
    """Return the architecture that ``settings``, the content of a ``config.json``, describes.

    ``origin``: directory of the file. ``trusted``: allow Python code in it to build the model.
    """
    code = origin if trusted and "auto_map" in settings else ""
    _check_type(settings, origin, bool(code))
    text = json.dumps(dict(settings), sort_keys=True)
    with raised_as(CheckpointError, f"config.json in {origin!r} is incomplete or damaged"):
        config = _config(text, code)
        # Model types have different names for a size. A size that a type lacks is 0.
        values = config.to_dict()
        sizes = {name: _size(values, keys) for name, keys in _SIZES.items()}
        heads = sizes["num_attention_heads"] or 1  # a type without attention
        groups = sizes["num_query_groups"] or heads
        positions = sizes["max_position_embeddings"]
        hidden = sizes["hidden_size"]
        return TransformersArchitecture(
            num_layers=sizes["num_layers"] or config.num_hidden_layers,
            hidden_size=hidden,
            ffn_hidden_size=sizes["ffn_hidden_size"] or 4 * hidden,
            num_attention_heads=heads,
            num_query_groups=groups if heads % groups == 0 else heads,
            kv_channels=sizes["kv_channels"] or max(1, hidden // heads),
            vocab_size=config.vocab_size,
            max_position_embeddings=positions if positions > 0 else _UNLIMITED,
            tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            make_vocab_size_divisible_by=1,
            family=settings["model_type"],
            settings=text,
            code=code,
        )


def _check_type(settings: Mapping[str, Any], origin: str, has_code: bool) -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # Properties of the model: its type, the types of its parts, and whether it is causal.
    model_type = settings.get("model_type")
    part_types = [
        f"{name}.model_type={part['model_type']}"
        for name, part in settings.items()
        if name.endswith("_config") and isinstance(part, dict) and "model_type" in part
    ]
    if has_code:
        is_causal = "AutoModelForCausalLM" in settings["auto_map"]
    else:
        is_causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    # Find the first reason why the model cannot be trained.
    version, problem = f"transformers {transformers.__version__}", ""
    if model_type not in CONFIG_MAPPING_NAMES and not has_code:
        known_types = sorted(CONFIG_MAPPING_NAMES)
        similar_types = difflib.get_close_matches(str(model_type), known_types, n=3)
        similar = f" Similar types: {', '.join(similar_types)}." if similar_types else ""
        problem = (
            f"is not supported by {version}.{similar} Install a version of transformers that has "
            "the model"
        )
        if settings.get("auto_map"):
            problem = (
                f"needs the Python code in the directory (auto_map), because {version} has no such "
                "type. Read the code, then set model.trust_remote_code=true and "
                "policy.backend=dtensor"
            )
    elif any("text" in part_type for part_type in part_types):
        problem = (
            f"has inputs of several kinds ({', '.join(part_types)}). Save only its language model "
            "with save_pretrained, and give that directory"
        )
    elif not is_causal or settings.get("is_encoder_decoder"):
        problem = "is not a decoder-only language model. Give a causal language model's directory"
    elif settings.get("quantization_config"):
        method = dict(settings["quantization_config"]).get("quant_method", "unknown")
        problem = (
            f"is quantised ({method}), but training needs unquantised weights. Give the directory "
            "of the unquantised model"
        )
    if problem:
        raise CheckpointError(f"model_type={model_type!r} in config.json of {origin!r} {problem}")


def _size(values: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the first nonzero value of the keys ``names``, or 0. Of a list, take the maximum."""
    value = next(filter(None, map(values.get, names)), 0)
    return max(value) if isinstance(value, list | tuple) else int(value)


def _config(text: str, code: str) -> "PreTrainedConfig":
    """Parse ``text``, a ``config.json``. If ``code`` names a directory, use its Python code."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    if code:
        return AutoConfig.from_pretrained(code, trust_remote_code=True, local_files_only=True)

    def special_float(content: dict[str, Any]) -> Any:
        """Decode infinity and NaN, which transformers writes as ``{"__float__": "Infinity"}``."""
        return float(content["__float__"]) if content.keys() == {"__float__"} else content

    settings = json.loads(text, object_hook=special_float)
    return CONFIG_MAPPING[settings["model_type"]].from_dict(settings)


def _own_config(architecture: GPTArchitecture) -> "PreTrainedConfig":
    assert isinstance(architecture, TransformersArchitecture)
    return _config(architecture.settings, architecture.code)


def unapplied_settings(architecture: GPTArchitecture) -> dict[str, float]:
    """Return the rates of dropout and router noise, and router loss weights, that are not 0."""
    settings = _own_config(architecture).to_dict()
    unapplied = [*_RANDOM, *(["aux_loss"] if settings.get("output_router_logits") else [])]
    return {
        name: value
        for name, value in settings.items()
        if any(part in name for part in unapplied) and type(value) in (int, float) and value > 0
    }


def model_config(architecture: GPTArchitecture) -> "PreTrainedConfig":
    """Return transformers' configuration of the model, with `unapplied_settings` set to 0."""
    if architecture.has_table:
        from transformers import AutoConfig

        return AutoConfig.for_model(**config_to_hf(architecture)[1])
    config = _own_config(architecture)
    for name in unapplied_settings(architecture):
        setattr(config, name, 0.0)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    return config


def empty_model(
    architecture: GPTArchitecture, dtype: torch.dtype = torch.float32
) -> "PreTrainedModel":
    """Build the model in ``dtype`` with parameters on the meta device and buffers on the host."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    is_trusted = bool(getattr(architecture, "code", ""))
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            model_config(architecture), dtype=dtype, trust_remote_code=is_trusted
        )
    model.tie_weights()
    wide = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    for name, buffer in model.named_buffers():
        if any(part in name for part in wide):  # transformers keeps it in float32
            buffer.data = buffer.float()
    return model


def parameter_shapes(architecture: GPTArchitecture) -> dict[str, Shape]:
    """Return the shape of every parameter by its name. Tied weights occur once."""
    parameters = empty_model(architecture).named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in parameters}


def body_path(model: "PreTrainedModel") -> str:
    """Return the name of the submodule that computes the output layer's input."""
    # Neither ``get_decoder`` nor ``base_model`` is this module for all types.
    for body in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        if body is not None and body is not model and not isinstance(body, nn.Linear):
            return path_of(model, body)
    raise CheckpointError(
        f"transformers' {type(model).__name__} cannot be trained, because it has no submodule "
        "that contains all layers but the output layer. Choose another model"
    )


def path_of(model: nn.Module, part: nn.Module) -> str:
    """Return the name of the submodule ``part`` of ``model``."""
    return next(name for name, module in model.named_modules() if module is part)


def save_any(
    folder: Path,
    weights: Weights,
    architecture: GPTArchitecture,
    tokenizer_files: Mapping[str, bytes],
    keys: Mapping[str, Any],
) -> None:
    """Write a new directory for ``from_pretrained``. An error leaves no partial directory.

    ``weights``: name in the module → tensor of any shape. ``keys``: settings of a reward model,
    under the keys of NeMo's configuration, which are stored with its head.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = empty_model(architecture)
    model.config = _own_config(architecture)
    state = {name: tensor.contiguous() for name, tensor in weights.items() if name not in _HEAD}
    model.to(next(tensor.dtype for tensor in state.values() if tensor.is_floating_point()))
    with new_folder(folder) as partial:
        model.save_pretrained(partial, state_dict=state)
        for name, content in tokenizer_files.items():
            (partial / name).write_bytes(content)
        if _HEAD[0] in weights:
            head = {key: weights[name] for key, name in zip(REWARD_HEAD, _HEAD, strict=True)}
            save_file(head, partial / HEAD_FILE, metadata={"keys": json.dumps(dict(keys))})


@functools.lru_cache(maxsize=1)
def names_in_files(architecture: GPTArchitecture) -> tuple["PreTrainedModel", dict[str, str]]:
    """Return the model on the meta device, and a map from names in files to names in the module.

    Raises `ConfigError` if inference engines cannot load the model: its files join tensors that are
    separate in the module, or its Python code is in its directory.
    """
    model = empty_model(architecture)
    saved_names = model.state_dict().keys()
    named_tensors = (*model.named_parameters(), *model.named_buffers())
    tensors = {name: tensor for name, tensor in named_tensors if name in saved_names}
    shapes, names = {}, {}
    for name, tensor in tensors.items():
        for file_name, part in _as_in_files(model, {name: tensor}).items():
            shapes[file_name], names[file_name] = part.shape, name
    converted = _as_in_files(model, tensors)
    problem = "its Python code is in its directory" if getattr(architecture, "code", "") else ""
    if converted.keys() != names.keys() or any(converted[n].shape != shapes[n] for n in converted):
        problem = "its files join tensors that are separate in the model"
    if problem:
        raise ConfigError(
            f"generation.backend: engines cannot load the {architecture.family} model, because "
            f"{problem}. Set generation.backend=megatron to sample with the policy's model"
        )
    return model, names


def _as_in_files(model: "PreTrainedModel", tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


class FileWeights(LazyTensors):
    """Weights [...] under their names in files. A module's weight is converted when indexed."""

    def __init__(self, weights: Mapping[str, Tensor], architecture: GPTArchitecture) -> None:
        self._weights = weights
        self._model, self._sources = names_in_files(architecture)
        self._converted: dict[str, Tensor] = {}  # of one tensor of the module
        super().__init__(self._sources)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._converted:
            source = self._sources[name]
            self._converted = _as_in_files(self._model, {source: self._weights[source]})
        return self._converted[name]


def require_megatron(architecture: GPTArchitecture) -> None:
    """Raise `CheckpointError` if megatron-core cannot build the architecture."""
    if not architecture.has_table:
        raise CheckpointError(
            f"model_type={architecture.family!r} is a model of transformers that megatron-core "
            "does not build. Set policy.backend=dtensor to train it with transformers"
        )
