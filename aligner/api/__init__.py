"""Training and generation from Python: `train_ppo` and the other algorithms, and `load_model`.

A training function writes its arguments into the run's directory and starts the same script as the
command line does in another process::

    caller                              run (another process)
    arguments  -> overrides        ->   aligner train-ppo KEY=VALUE ...
    functions  -> python/NAME.py   ->   imported by path
    rows       -> python/NAME.jsonl ->  read as any file
    Result     <- metrics, report, trained model in the run's directory

The caller's process therefore keeps its random generators, its devices and its process groups, and
two calls with different layouts do not meet.
"""
