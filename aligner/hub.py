"""Models and data sets on Hugging Face's hub, whose names can be given in place of paths."""

import os
import re
from fnmatch import fnmatch
from glob import glob
from pathlib import Path

from pydantic import AfterValidator, ValidationInfo
from pydantic_core import PydanticCustomError

_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/([^:]+))?")
_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py"]
_DATA_FILES = (".parquet", ".jsonl", ".json", ".csv")


def hub_remedy(path: str, kind: str = "model") -> str:
    """Return advice for a missing ``path`` that could be a name on Hugging Face's hub, else ""."""
    name = _NAME.fullmatch(path)
    if name is None or (path.endswith((".nemo", ".gguf", *_DATA_FILES)) and "*" not in path):
        return ""
    option, instead = "", "a directory (policy.model_name in NeMo-RL's mappings)"
    if kind == "dataset":
        option, instead = " --repo-type dataset", "files on the disk"
    return (
        ". If it is a name on Hugging Face's hub, it is not in the local cache: set download=true, "
        f"run hf download {name[1]}{option}, or give {instead}"
    )


def _snapshot(name: str, kind: str, patterns: list[str], info: ValidationInfo) -> str | None:
    """Return a repository's folder in the hub's cache, or None. May download it."""
    from huggingface_hub import snapshot_download

    downloads = bool(info.context and info.context["download"])
    try:
        folder: str = snapshot_download(
            name, repo_type=kind, allow_patterns=patterns, local_files_only=not downloads
        )
    except Exception as error:  # of the hub, its HTTP client or the disk, or not a valid name
        if not downloads:
            return None
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise PydanticCustomError(
            "hub",
            "{key}={name}: the {kind} cannot be downloaded ({reason}). Correct the name or path, "
            "set HF_TOKEN for a {kind} with restricted access, or remove download=true",
            {"name": name, "kind": kind, "reason": reason},
        ) from error
    return folder


def _local_model(path: str, info: ValidationInfo) -> str:
    """Return the cached folder of a model named ``owner/name``. Return other paths unchanged."""
    name = _NAME.fullmatch(path)
    if name is None or name[2] or path.endswith(".nemo") or os.path.exists(path):
        return path
    folder = _snapshot(path, "model", _MODEL_FILES, info)
    return folder if folder and os.path.isfile(os.path.join(folder, "config.json")) else path


def _local_data(path: str, info: ValidationInfo) -> str:
    """Return the cached files of ``owner/name`` or ``owner/name/PATTERN``, else ``path``."""
    name = _NAME.fullmatch(path)
    if name is None or os.path.exists(path) or glob(path, recursive=True):
        return path
    pattern = name[2] or "*train*"
    folder = _snapshot(name[1], "dataset", [pattern], info)
    if folder is None:
        return path
    files = [file.relative_to(folder).as_posix() for file in Path(folder).rglob("*.*")]
    files = [file for file in files if fnmatch(file, pattern) and file.endswith(_DATA_FILES)]
    sets = sorted({re.sub(r"-\d+-of-\d+", "-*", file) for file in files})
    if not name[2] and len(sets) != 1:
        raise PydanticCustomError(
            "hub",
            "{key}={name}: the data set has several training sets or none: {sets}. Give a pattern "
            "of files, such as {name}/data/train-*.parquet",
            {"name": name[1], "sets": ", ".join(sets) or "none"},
        )
    return f"{folder}/{name[2] or sets[0]}" if files else path


ON_HUB = AfterValidator(_local_model)
DATA_ON_HUB = AfterValidator(_local_data)
