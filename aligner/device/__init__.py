"""The device of a process: accelerator, host memory, and code compiled for them."""
