"""Data sets and policies of a section of the configuration, as a run loads them."""

import json

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import (
    DataConfig,
    ExampleDataConfig,
    PreferenceDataConfig,
    PromptSourceConfig,
    RewardDataConfig,
)
from aligner.data.preferences import LabelledDataset, OrderedPairDataset, PairDataset, RatedDataset
from aligner.data.prompts import PromptDataset
from aligner.data.supervised import ExampleDataset
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.workers import LocalCluster
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.groups import initialize_parallel

SECTIONS = {
    PromptDataset: DataConfig,
    ExampleDataset: ExampleDataConfig,
    PairDataset: PreferenceDataConfig,
    OrderedPairDataset: PreferenceDataConfig,
    LabelledDataset: PreferenceDataConfig,
    RatedDataset: RewardDataConfig,
}


def load_set(kind, source, tokenizer, arguments=None, limit=None, **options):
    """``kind`` of ``source``; ``options``: keys of its section."""
    paths = tuple(map(str, source)) if isinstance(source, list) else str(source)
    train = PromptSourceConfig(paths, arguments or {}, limit)
    return kind.load(train, tokenizer, SECTIONS[kind](train=train, **options))


def load_policy(model, **options):
    """The policy of the section ``model`` in this process, by default without a reference."""
    with open_nemo(model.restore_from_path) as checkpoint:
        cluster, tokenizer = LocalCluster(initialize_parallel(model.parallel)), checkpoint.tokenizer
    return Policy(cluster, model, tokenizer, **{"init_reference_model": False, **options})


def write_rows(path, rows):
    """Write rows as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_rows(kind, folder, rows, tokenizer=None, **options):
    """``kind`` of ``rows``, written to ``x.jsonl``. Default: the byte-level tokenizer."""
    path = write_rows(folder / "x.jsonl", rows)
    return load_set(kind, path, tokenizer or byte_level_tokenizer(), **options)


def learned_texts(tokenizer, example):
    """Texts of the learned spans of an example."""
    return [tokenizer.decode(example.ids[start:end]) for start, end in example.learned]
