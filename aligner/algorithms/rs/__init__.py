"""Rejection sampling."""
