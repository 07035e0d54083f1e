"""The device of a process: accelerator, host memory, and compiled code."""
