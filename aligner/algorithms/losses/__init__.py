"""Losses over one micro-batch, each with its global denominator."""
