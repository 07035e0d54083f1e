"""Preference optimisation: DPO and its relatives."""
