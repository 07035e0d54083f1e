"""The life of a run of any algorithm: engine, directory, loop."""
