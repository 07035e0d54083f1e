"""Devices, process groups, batches and worker groups."""
