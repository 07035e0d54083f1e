"""vLLM engines that sample for a policy."""
