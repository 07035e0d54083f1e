"""`aligner.batches.batched_data_dict` under NeMo-RL's name."""

from aligner.batches.batched_data_dict import (
    BatchedDataDict,
    DynamicBatchingArgs,
    SequencePackingArgs,
    SlicedDataDict,
)

__all__ = ["BatchedDataDict", "DynamicBatchingArgs", "SequencePackingArgs", "SlicedDataDict"]
