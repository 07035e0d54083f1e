"""Place of workers of trained reward models."""
