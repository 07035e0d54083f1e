"""Estimates of the memory, arithmetic and time of a training run, without its devices.

The roles of a configuration are built on the dry device (`aligner_plan.dry`) and run there in every
phase of the algorithm's step. A table of device rates turns the counts into seconds.

    configuration ─► roles, phases ─► dry runs of few layers ─► all layers ─► cards, seconds
"""
