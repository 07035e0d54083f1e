"""The modules of a transformer layer. `short_attention` is for CPUs, see `aligner.kernels`."""
