"""What a training run takes, before there is a device: memory, arithmetic, communication, time.

The roles of a configuration are built and stepped on the dry device (`aligner.dry`), each in every
phase of its algorithm's step; a table of device rates turns what was counted into seconds.

    configuration ─► roles, phases ─► dry runs of few layers ─► all layers ─► cards, seconds
"""
