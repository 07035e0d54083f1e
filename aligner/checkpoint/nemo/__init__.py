"""`.nemo` files: the container, its configuration, weights and tokenizer."""
