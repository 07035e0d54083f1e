"""The device of a process: accelerator, host memory, compiled code, device-independent hashes."""
