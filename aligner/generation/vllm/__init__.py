"""vLLM engines that sample responses with a policy's weights."""
