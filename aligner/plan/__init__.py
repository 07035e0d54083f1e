"""Requirements of a training run, estimated without a device: memory, arithmetic, time.

The roles of a configuration are built and stepped on the dry device (`aligner.dry`), each in every
phase of its algorithm's step; a table of device rates turns the counts into seconds.

    configuration ─► roles, phases ─► dry runs of few layers ─► all layers ─► cards, seconds
"""
