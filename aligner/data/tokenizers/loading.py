"""Tokenizers out of files: detection of the kind, and reading it.

Hugging Face tokenizers are :class:`aligner.data.tokenizers.hf.HuggingFaceTokenizer`, SentencePiece
models :class:`aligner.data.tokenizers.sentencepiece.SentencePieceTokenizer`. Neither imports
transformers unless a chat template, a GGUF file or a directory without ``tokenizer.json`` needs
it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aligner.data.tokenizers.tokenizer import (
    GENERATION_CONFIG,
    Tokenizer,
    generation_ends,
    json_object,
)
from aligner.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DataError,
    TokenizerError,
    raised_as,
)
from aligner.importing import check_call, load_function

# Text that a tokenizer and the one its files make must encode alike.
_PROBE = "What is 12 + 34?\n  Sixteen, or é.\t😀  漢字 ½ 's\r\n\n I'LL "


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a directory or a file.

    Args:
        path: a Hugging Face directory; a ``tokenizer.json`` (its neighbours are read too, as
            ``generation_config.json``); a SentencePiece ``.model``; a directory with ``vocab.json``
            and ``merges.txt`` (GPT-2); or a ``.gguf`` file.

    Raises:
        CheckpointNotFoundError: ``path`` does not exist.
        TokenizerError: there is no tokenizer in it, or it is damaged.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointNotFoundError(
            f"tokenizer {path} does not exist; give a Hugging Face directory, a tokenizer.json "
            "or a SentencePiece .model"
        )
    if path.suffix == ".gguf":
        from aligner.data.tokenizers.gguf import gguf_tokenizer_files

        return tokenizer_from_files(gguf_tokenizer_files(path), origin=str(path))
    if path.suffix == ".model":
        return tokenizer_from_files({path.name: path.read_bytes()}, origin=str(path))
    directory = path if path.is_dir() else path.parent
    files = _read_known_files(directory)
    if path.is_file():
        if path.name not in ("tokenizer.json", "vocab.json", "merges.txt", *_CONFIG_FILES):
            files["tokenizer.json"] = path.read_bytes()
    elif is_slow(directory):
        return _convert_with_transformers(directory)
    elif len(files) == 1 and (model := next(iter(files))).endswith(".model"):
        raise TokenizerError(
            f"{path} has {model} alone, which SentencePiece and transformers split differently; "
            f"give {path / model} for SentencePiece's tokens, or add a tokenizer_config.json with "
            '{"tokenizer_class": "LlamaTokenizer"} for those of transformers'
        )
    return tokenizer_from_files(files, origin=str(path))


def named_tokenizer(name: str, *, key: str) -> Tokenizer:
    """The tokenizer at a path (`load_tokenizer`), or the one that a user's function builds.

    Args:
        name: a path, or ``package.module:function`` or ``path/to/file.py:function``. The function
            takes no argument and returns a tokenizer of transformers or a `Tokenizer`.
        key: the configuration key that held it, for error messages.

    Raises:
        ConfigError: the function cannot be imported or called, raises, or returns no tokenizer
            that its ``files`` rebuild, of which a trained model keeps only those.
        CheckpointNotFoundError, TokenizerError: see `load_tokenizer`.
    """
    if ":" not in name or Path(name).expanduser().exists():
        return load_tokenizer(name)
    function = load_function(name, key=key)
    check_call(function, (), f"{key}={name}", "It is called without arguments")
    try:
        made = as_tokenizer(function())
    except Exception as error:
        raise ConfigError(f"{key}={name}: raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Tokenizer):
        raise ConfigError(
            f"{key}={name}: returned a {type(made).__name__}; return a tokenizer of transformers, "
            "or one of aligner.data.tokenizers.tokenizer"
        )
    with raised_as(ConfigError, f"{key}={name}: its files make no tokenizer", TokenizerError):
        rebuilt = tokenizer_from_files(made.files(), origin=f"{key}={name}")
    if rebuilt.encode(_PROBE) != made.encode(_PROBE) or rebuilt.end_ids != made.end_ids:
        raise ConfigError(
            f"{key}={name}: what its files() rebuild encodes text or ends responses otherwise, "
            "and a trained model keeps the files; return a tokenizer of transformers"
        )
    return rebuilt  # it travels to any process


def tokenizer_from_files(
    files: Mapping[str, bytes], *, origin: str = "the tokenizer files"
) -> Tokenizer:
    """Build a tokenizer from file contents, as packed in an archive.

    Args:
        files: ``tokenizer.json`` (with ``tokenizer_config.json``, ``special_tokens_map.json``,
            ``chat_template.jinja`` if there are any), or ``vocab.json`` and ``merges.txt``, or one
            SentencePiece ``*.model``. With a ``tokenizer_config.json`` the latter is a Hugging Face
            tokenizer, special tokens and chat template included, as transformers converts it.
            ``generation_config.json`` names further tokens that end a response.
        origin: where they come from, for error messages.
    """
    # Imported here: each needs a package that the other does without.
    from aligner.data.tokenizers.hf import HuggingFaceTokenizer
    from aligner.data.tokenizers.sentencepiece import SentencePieceTokenizer

    models = [name for name in files if name.endswith(".model")]
    if "tokenizer.json" in files:
        return HuggingFaceTokenizer.from_files(files, origin=origin)
    is_pair = {"vocab.json", "merges.txt"} <= files.keys()
    if is_pair or ("tokenizer_config.json" in files and len(models) == 1):
        with TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / Path(name).name).write_bytes(content)
            config = json_object(files, "tokenizer_config.json", origin)
            if not config.get("tokenizer_class"):  # else ``config.json`` names it
                config["tokenizer_class"] = "GPT2Tokenizer" if is_pair else "LlamaTokenizer"
                (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
            return _convert_with_transformers(Path(folder), origin=origin)
    if len(models) == 1:
        return SentencePieceTokenizer(
            files[models[0]], further_ends=generation_ends(files, origin), origin=origin
        )
    raise TokenizerError(
        f"{origin} holds no tokenizer; looked for tokenizer.json, one *.model, or vocab.json with "
        f"merges.txt and found {sorted(files) or 'nothing'}"
    )


def with_chat_template(tokenizer: Tokenizer, path: str | Path, *, key: str) -> Tokenizer:
    """The same tokenizer with the chat template of a Jinja file in place of its own, if any.

    Raises:
        ConfigError: the file cannot be read, the tokenizer can have no template, or it does not
            render what a user and the assistant say; the message begins with ``key``.
    """
    what = f"{key}={path}"
    with raised_as(ConfigError, f"{what}: it cannot be read as text", OSError, UnicodeDecodeError):
        template = Path(path).expanduser().read_text(encoding="utf-8-sig")
    files = tokenizer.files()
    if "tokenizer.json" not in files:
        raise ConfigError(
            f"{what}: a SentencePiece model has no place for a chat template; give a Hugging Face "
            "tokenizer in model.tokenizer"
        )
    files.pop("chat_template.jinja", None)
    config = json_object(files, "tokenizer_config.json", what) | {"chat_template": template}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    found = tokenizer_from_files(files, origin=what)
    said = {"user": "a question", "assistant": "an answer"}
    with raised_as(ConfigError, what, DataError, TokenizerError, remedy="mend the template"):
        shown = found.apply_chat_template(
            [{"role": role, "content": text} for role, text in said.items()],
            add_generation_prompt=False,
        )
    lost = [role for role, text in said.items() if text not in shown]
    if lost:
        raise ConfigError(
            f"{what}: it shows nothing of what the {lost[0]} says, but {shown[:60]!r}; mend the "
            "template"
        )
    return found


def with_template_kwargs(tokenizer: Tokenizer, values: Mapping[str, Any]) -> Tokenizer:
    """The same with ``data.chat_template_kwargs``; `ConfigError`: no template reads one of them."""
    try:
        return tokenizer.with_template_kwargs(values)
    except DataError as error:
        raise ConfigError(f"data.{error}") from error


def as_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer of transformers as one of ours; what is ours, or None, is returned as it is."""
    if not hasattr(tokenizer, "save_pretrained"):
        return tokenizer
    origin = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    return tokenizer_from_files(_saved_files(tokenizer), origin=origin)


_CONFIG_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    GENERATION_CONFIG,
)


def _read_known_files(directory: Path) -> dict[str, bytes]:
    names = ["tokenizer.json", "vocab.json", "merges.txt", *_CONFIG_FILES]
    candidates = [directory / name for name in names] + sorted(directory.glob("*.model"))
    files = {file.name: file.read_bytes() for file in candidates if file.is_file()}
    return fold_named_templates(directory, files)


def fold_named_templates(directory: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """``files`` of the directory, with its ``additional_chat_templates/`` as a list in one of them.

    The list is in ``tokenizer_config.json``, beside the default of ``chat_template.jinja``.
    """
    paths = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    if not paths:
        return files
    named = {path.stem: path.read_text(encoding="utf-8-sig") for path in paths}
    config = json_object(files, "tokenizer_config.json", str(directory))
    text = files.pop("chat_template.jinja", b"").decode("utf-8-sig")
    default = text or config.get("chat_template")
    if isinstance(default, str):
        named = {"default": default, **named}
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return {**files, "tokenizer_config.json": json.dumps(config, indent=2).encode()}


def _saved_files(tokenizer: Any) -> dict[str, bytes]:
    """Files in which a tokenizer of transformers saves itself."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return _read_known_files(Path(folder))


def is_slow(directory: Path) -> bool:
    """Return whether a directory has a vocabulary whose class decides how text is split."""
    names = {path.name for path in directory.iterdir()}
    has_vocabulary = "vocab.json" in names or any(name.endswith(".model") for name in names)
    has_class = "tokenizer_config.json" in names or ("config.json" in names and has_vocabulary)
    return has_class and "tokenizer.json" not in names


def _convert_with_transformers(directory: Path, origin: str | None = None) -> Tokenizer:
    """Let transformers turn a slow tokenizer into a ``tokenizer.json``."""
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
            raise TypeError(f"{type(converted).__name__} makes no tokenizer.json")
    found = HuggingFaceTokenizer.from_files(files, origin=origin)
    if found.encode(_PROBE) != expected:
        raise TokenizerError(
            f"{origin}: {type(converted).__name__} splits text otherwise than the tokenizer.json "
            "that transformers makes of it; give a model with a tokenizer.json of its own"
        )
    return found
