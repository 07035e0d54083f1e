"""The life of a run, whichever its algorithm: engine, directory, loop."""
