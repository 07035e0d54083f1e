"""Sampling with the training weights: key-value cache, scheduler, sampler."""
