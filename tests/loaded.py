"""Data sets by the columns and limits of a section of the configuration, as a run loads them."""

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
