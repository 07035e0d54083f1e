"""Tokenizers of GGUF files: transformers builds them, with the file's rule for splitting text."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from aligner.data.tokenizers.tokenizer import generation_file, is_tokenizer_file, named_templates
from aligner.errors import CheckpointError, raised_as
from aligner.packages import require_extra

_ARRAYS = ("tokens", "scores", "token_type", "merges")  # long arrays of the tokenizer
# Keys with the prefix tokenizer.ggml. that transformers reads, or that do not affect tokenization.
_KNOWN = {
    *("model", "pre", *_ARRAYS, "add_bos_token", "add_eos_token", "add_sep_token"),
    *("add_space_prefix", "token_type_count", "bos_token_id", "eos_token_id", "unknown_token_id"),
    *("padding_token_id", "eot_token_id", "eom_token_id", "seperator_token_id", "mask_token_id"),
    *("cls_token_id", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
    *("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "prefix_token_id"),
    *("suffix_token_id", "middle_token_id"),
}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT)
_GPT2 = None  # ByteLevel's built-in expression
_DIGITS_THEN_GPT2 = (_DIGIT, _GPT2)
# tokenizer.ggml.pre → expressions that split a text before byte-pair merging, in order.
_RULES: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(("exaone", "minerva-7b"), _DIGITS_THEN_GPT2),
    "tekken": (_TEKKEN,),
    "deepseek-coder": _DEEPSEEK_CODER,
}
# Rules with which a word of the vocabulary is always one token, whatever the merges are.
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"}


def gguf_values(path: Path) -> tuple[Any, dict[str, Any]]:
    """Open a GGUF file. Returns its ``gguf.GGUFReader``, and key → value of its metadata.

    Long arrays of the tokenizer have the value None. Raises `CheckpointError` for a damaged file,
    `MissingPackageError` if the package gguf is not installed.
    """
    require_extra("gguf", str(path))
    from gguf import GGUFReader

    arrays = {f"tokenizer.ggml.{name}" for name in _ARRAYS}
    # gguf and numpy raise many types of errors for a damaged file.
    with raised_as(CheckpointError, f"{str(path)!r} cannot be read as a GGUF model"):
        reader = GGUFReader(path)
        values = {
            key: None if key in arrays else field.contents() for key, field in reader.fields.items()
        }
    return reader, values


def gguf_tokenizer_files(path: Path) -> dict[str, bytes]:
    """Return name → content of the Hugging Face tokenizer files for a GGUF file.

    Raises `CheckpointError` if the file has no tokenizer, or an unknown rule for splitting text.
    """
    from transformers import AutoTokenizer

    reader, values = gguf_values(path)
    prefix, template_prefix = "tokenizer.ggml.", "tokenizer.chat_template."
    keys = {key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)}
    _check(path, keys)
    # transformers raises many types of errors for unknown settings.
    with raised_as(CheckpointError, f"{str(path)!r}: transformers cannot build a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True
        )
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            paths = (path for path in Path(folder).iterdir() if is_tokenizer_file(path.name))
            files = {path.name: path.read_bytes() for path in paths}
    # Correct tokenizer.json: transformers adds GPT-2's end token, and ignores the splitting rule.
    content = json.loads(files["tokenizer.json"])
    vocab_size = len(reader.fields["tokenizer.ggml.tokens"].data)
    added = [token for token in content["added_tokens"] if token["id"] < vocab_size]
    if added != content["added_tokens"]:
        files["tokenizer.json"] = json.dumps({**content, "added_tokens": added}).encode()
    if keys["model"] == "gpt2":
        files["tokenizer.json"] = _with_rule(files["tokenizer.json"], keys.get("pre") or "gpt-2")
    # Remove settings that transformers adds when it loads a file.
    settings = json.loads(files["tokenizer_config.json"])
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    # Convert several named chat templates to a list.
    named = {
        key.removeprefix(template_prefix): text
        for key, text in values.items()
        if key.startswith(template_prefix)
    }
    if named:
        text = files.pop("chat_template.jinja", b"").decode()
        default = text or values.get("tokenizer.chat_template")
        settings["chat_template"] = named_templates(named, default)
    files["tokenizer_config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    # A response may also end with the end token of a turn (eot) or of a message (eom).
    ends = [keys[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in keys]
    if len(set(ends)) > 1:
        files |= generation_file(dict.fromkeys(ends))
    return files


def _check(path: Path, keys: dict[str, Any]) -> None:
    model, pre = keys.get("model"), keys.get("pre")
    problem = ""
    if model not in ("gpt2", "llama"):
        problem = f"model={model!r} is not supported. Supported: gpt2 and llama"
    elif "tokens" not in keys or (model == "gpt2" and "merges" not in keys):
        problem = (
            f"{'merges' if 'tokens' in keys else 'tokens'} is missing. Create the GGUF file again"
        )
    elif model == "gpt2" and pre is not None and pre not in _RULES:
        problem = f"pre={pre!r} is an unknown splitting rule. Known: {', '.join(_RULES)}"
    elif model == "llama" and keys.get("add_space_prefix") is False:
        problem = "add_space_prefix=false is not supported"
    elif model == "llama" and keys.pop("remove_extra_whitespaces", False):
        problem = "remove_extra_whitespaces=true is not supported"
    # All remaining keys must be known.
    keys.pop("remove_extra_whitespaces", None)
    unknown = sorted(set(keys) - _KNOWN)
    if not problem and unknown:
        problem = f"{unknown[0]} is not supported"
    if problem:
        raise CheckpointError(
            f"{str(path)!r}: tokenizer.ggml.{problem}. You can also give the model's Hugging Face "
            "directory instead of the GGUF file"
        )


def _with_rule(tokenizer: bytes, name: str) -> bytes:
    backend = RustTokenizer.from_buffer(tokenizer)
    splits = [
        pre_tokenizers.Digits(individual_digits=True)
        if expression == _DIGIT
        else pre_tokenizers.Split(Regex(expression), behavior="isolated")
        for expression in _RULES[name]
        if expression is not None
    ]
    # Bytes are mapped to characters after the text is split.
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=None in _RULES[name])
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last]) if splits else last
    if name in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    content = json.loads(backend.to_str())
    content["model"]["ignore_merges"] = name in _WHOLE_WORDS
    return RustTokenizer.from_str(json.dumps(content)).to_str(pretty=True).encode()
