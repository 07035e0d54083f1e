"""Worker groups: workers in this process, in processes of torchrun, or on Ray."""
