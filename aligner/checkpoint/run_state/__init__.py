"""The state of a run on disk, complete or not there."""
