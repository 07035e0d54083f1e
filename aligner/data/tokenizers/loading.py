"""Load tokenizers from files in all supported formats.

transformers is imported only for chat templates, GGUF files and files that it must convert.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aligner.data.tokenizers.tokenizer import (
    GENERATION_CONFIG,
    Tokenizer,
    config_of,
    generation_ends,
    named_templates,
)
from aligner.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DataError,
    TokenizerError,
    raised_as,
)
from aligner.importing import check_call, load_function, user_errors

# Text that a tokenizer and its conversion must encode equally.
_PROBE = "What is 12 + 34?\n  Sixteen, or é.\t😀  漢字 ½ 's\r\n\n I'LL "


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a directory or a file.

    ``path``: a Hugging Face directory, a ``tokenizer.json`` (other tokenizer files in its directory
    are read too), a SentencePiece ``.model``, a directory with ``vocab.json`` and ``merges.txt``
    (GPT-2), or a ``.gguf`` file. Raises `CheckpointNotFoundError` if ``path`` does not exist, and
    `TokenizerError` if it contains no tokenizer, or a damaged one.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointNotFoundError(
            f"tokenizer {path} does not exist. Give a Hugging Face directory, a tokenizer.json "
            "or a SentencePiece .model"
        )
    # Read formats that consist of one file.
    if path.suffix == ".gguf":
        from aligner.data.tokenizers.gguf import gguf_tokenizer_files

        return tokenizer_from_files(gguf_tokenizer_files(path), origin=str(path))
    if path.suffix == ".model":
        return tokenizer_from_files({path.name: path.read_bytes()}, origin=str(path))
    # Read a Hugging Face directory, or the directory of the file.
    directory = path if path.is_dir() else path.parent
    files = read_files(directory)
    if path.is_file():
        if path.name not in ("tokenizer.json", "vocab.json", "merges.txt", *_CONFIG_FILES):
            files["tokenizer.json"] = path.read_bytes()  # under another name
    elif is_slow(directory):
        return _convert_with_transformers(directory)
    elif len(files) == 1 and (model := next(iter(files))).endswith(".model"):
        raise TokenizerError(
            f"{path} contains only {model}, which SentencePiece and transformers split "
            f"differently. Give {path / model} for SentencePiece's tokens, or add a "
            'tokenizer_config.json with {"tokenizer_class": "LlamaTokenizer"} for the tokens of '
            "transformers"
        )
    return tokenizer_from_files(files, origin=str(path))


def named_tokenizer(name: str, *, key: str) -> Tokenizer:
    """Load the tokenizer that a configuration key names: a path, or a user's function.

    ``name``, the value of ``key``: a path for `load_tokenizer`, ``package.module:function`` or
    ``path/to/file.py:function``. The function has no arguments and returns a tokenizer of
    transformers or a `Tokenizer`. Raises `ConfigError` if the function cannot be imported, raises
    an error, or returns no tokenizer. Also raises it if the returned tokenizer's `files` give a
    different tokenizer.
    """
    if ":" not in name or Path(name).expanduser().exists():
        return load_tokenizer(name)
    # Call the user's function.
    function = load_function(name, key=key)
    check_call(function, (), f"{key}={name}", "It is called without arguments")
    with user_errors(f"{key}={name}", "the function"):
        tokenizer = as_tokenizer(function())
    if not isinstance(tokenizer, Tokenizer):
        raise ConfigError(
            f"{key}={name}: returned a {type(tokenizer).__name__}. Return a tokenizer of "
            "transformers, or of aligner.data.tokenizers.tokenizer"
        )
    # A trained model contains only the tokenizer's files, which must give an equal tokenizer.
    with raised_as(ConfigError, f"{key}={name}: its files make no tokenizer", TokenizerError):
        rebuilt = tokenizer_from_files(tokenizer.files(), origin=f"{key}={name}")
    if rebuilt.encode(_PROBE) != tokenizer.encode(_PROBE) or rebuilt.end_ids != tokenizer.end_ids:
        raise ConfigError(
            f"{key}={name}: a tokenizer built from the returned tokenizer's files() encodes text "
            "or ends responses differently. Return a tokenizer of transformers, because a trained "
            "model contains only these files"
        )
    return rebuilt  # picklable, unlike a user's object


def tokenizer_from_files(
    files: Mapping[str, bytes], *, origin: str = "the tokenizer files"
) -> Tokenizer:
    """Build a tokenizer from the contents of its files.

    ``files``: contents by file name. Required are a ``tokenizer.json``, a ``vocab.json`` with
    ``merges.txt``, or one SentencePiece ``*.model``. With a ``tokenizer_config.json``, transformers
    converts a ``*.model`` to a Hugging Face tokenizer. ``origin``: name of the source, for errors.
    Raises `TokenizerError` if the files contain no tokenizer, or a damaged one.
    """
    # These modules require packages that may not be installed.
    from aligner.data.tokenizers.hf import HuggingFaceTokenizer
    from aligner.data.tokenizers.sentencepiece import SentencePieceTokenizer

    models = [name for name in files if name.endswith(".model")]
    if "tokenizer.json" in files:
        return HuggingFaceTokenizer.from_files(files, origin=origin)
    # transformers converts GPT-2's files, and a SentencePiece model with a configuration.
    is_gpt2 = {"vocab.json", "merges.txt"} <= files.keys()
    if is_gpt2 or ("tokenizer_config.json" in files and len(models) == 1):
        with TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / Path(name).name).write_bytes(content)
            config = config_of(files, "tokenizer_config.json", origin)
            if not config.get("tokenizer_class"):  # it was in the model's ``config.json``
                config["tokenizer_class"] = "GPT2Tokenizer" if is_gpt2 else "LlamaTokenizer"
                (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
            return _convert_with_transformers(Path(folder), origin=origin)
    if len(models) == 1:
        return SentencePieceTokenizer(
            files[models[0]], extra_ends=generation_ends(files, origin), origin=origin
        )
    raise TokenizerError(
        f"{origin} contains no tokenizer: tokenizer.json, one *.model, or vocab.json with "
        f"merges.txt is required, found {sorted(files) or 'no files'}"
    )


def with_chat_template(tokenizer: Tokenizer, path: str | Path, *, key: str) -> Tokenizer:
    """Return the tokenizer with the Jinja file ``path`` as its chat template.

    ``key``: configuration key of the path, for errors. Raises `ConfigError` if the file cannot be
    read, the tokenizer cannot have a template, or the template omits messages of user or assistant.
    """
    setting = f"{key}={path}"
    text = f"{setting}: cannot be read as text"
    with raised_as(ConfigError, text, OSError, UnicodeDecodeError):
        template = Path(path).expanduser().read_text(encoding="utf-8-sig")
    # Replace the template in the files, because the trained model stores the files.
    files = tokenizer.files()
    if "tokenizer.json" not in files:
        raise ConfigError(
            f"{setting}: a SentencePiece model cannot have a chat template. Give a Hugging Face "
            "tokenizer in model.tokenizer"
        )
    files.pop("chat_template.jinja", None)
    config = config_of(files, "tokenizer_config.json", setting) | {"chat_template": template}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    result = tokenizer_from_files(files, origin=setting)
    # Check that a rendered chat contains both messages.
    messages = {"user": "a question", "assistant": "an answer"}
    with raised_as(ConfigError, setting, DataError, TokenizerError, remedy="correct the template"):
        chat = result.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages.items()],
            add_generation_prompt=False,
        )
    omitted = [role for role, content in messages.items() if content not in chat]
    if omitted:
        raise ConfigError(
            f"{setting}: the template omits the message of the {omitted[0]}. Instead, it renders "
            f"{chat[:60]!r}. Correct the template"
        )
    return result


def with_template_kwargs(tokenizer: Tokenizer, values: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer with the template variables of ``data.chat_template_kwargs``.

    Raises `ConfigError` if the template does not read a variable, or its name is reserved.
    """
    try:
        return tokenizer.with_template_kwargs(values)
    except DataError as error:
        raise ConfigError(f"data.{error}") from error


def as_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer of transformers as a `Tokenizer`, and any other object unchanged."""
    if not hasattr(tokenizer, "save_pretrained"):
        return tokenizer
    origin = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    return tokenizer_from_files(_saved_files(tokenizer), origin=origin)


_CONFIG_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    GENERATION_CONFIG,
)


def read_files(directory: Path, names: Iterable[str] | None = None) -> dict[str, bytes]:
    """Return name → content of the tokenizer files in a directory.

    ``names``: names of the files, by default all known ones. Templates in
    ``additional_chat_templates/`` are added to ``tokenizer_config.json``.
    """
    if names is None:
        models = sorted(path.name for path in directory.glob("*.model"))
        names = ["tokenizer.json", "vocab.json", "merges.txt", *_CONFIG_FILES, *models]
    files = {
        name: (directory / name).read_bytes() for name in names if (directory / name).is_file()
    }
    paths = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    if not paths:
        return files
    config = config_of(files, "tokenizer_config.json", str(directory))
    text = files.pop("chat_template.jinja", b"").decode("utf-8-sig")
    named = {path.stem: path.read_text(encoding="utf-8-sig") for path in paths}
    config["chat_template"] = named_templates(named, text or config.get("chat_template"))
    return {**files, "tokenizer_config.json": json.dumps(config, indent=2).encode()}


def _saved_files(tokenizer: Any) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return read_files(Path(folder))


def is_slow(directory: Path) -> bool:
    """Return whether a directory has only a slow tokenizer, which transformers must convert."""
    names = {path.name for path in directory.iterdir()}
    has_vocabulary = "vocab.json" in names or any(name.endswith(".model") for name in names)
    has_class = "tokenizer_config.json" in names or ("config.json" in names and has_vocabulary)
    return has_class and "tokenizer.json" not in names


def _convert_with_transformers(directory: Path, origin: str | None = None) -> Tokenizer:
    from transformers import AutoTokenizer

    from aligner.data.tokenizers.hf import HuggingFaceTokenizer

    origin = origin or str(directory)
    with raised_as(TokenizerError, f"{origin}: transformers cannot load a tokenizer"):
        converted = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        files = _saved_files(converted)
        if (directory / GENERATION_CONFIG).is_file():
            files[GENERATION_CONFIG] = (directory / GENERATION_CONFIG).read_bytes()
        expected = converted.encode(_PROBE, add_special_tokens=False)
        if "tokenizer.json" not in files:
            raise TypeError(f"{type(converted).__name__} cannot be saved as tokenizer.json")
    # The conversion must encode text as the tokenizer of transformers does.
    tokenizer = HuggingFaceTokenizer.from_files(files, origin=origin)
    if tokenizer.encode(_PROBE) != expected:
        raise TokenizerError(
            f"{origin}: {type(converted).__name__} and its conversion to tokenizer.json split text "
            "differently. Give a model with a tokenizer.json"
        )
    return tokenizer
