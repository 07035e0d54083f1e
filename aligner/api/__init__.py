"""Training and generation from Python: `train_ppo` and the other algorithms, and `load_model`.

A training function runs the script of the command line in another process. Functions and rows of
the caller become files in the run's directory, python/NAME.py and python/NAME.jsonl. The caller's
process keeps its random generators, devices and process groups.
"""
