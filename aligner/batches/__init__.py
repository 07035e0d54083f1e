"""Global batches: columns, and how rows become shards and micro-batches."""
