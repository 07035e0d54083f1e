"""The device of a process: accelerator, host memory, and compiled code.

The page allocator of `host_memory` (`pages.cpp`) serves CPUs only. A GRPO step of SmolLM2's shape
held 10.3 GB with it and 18.5 GB without, in 48.2 s and 55.9 s. With shared prefixes the step takes
0.23 of TRL's time and 0.27 of its memory (`benchmarks/LOG.md`, 2026-11-23).
"""
