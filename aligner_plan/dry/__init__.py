"""A dry device: the library's real code at full size on GPU tensors that have no memory.

Tensors are PyTorch's fake tensors with ``device="cuda"``, process groups are PyTorch's fake groups
of any size; megatron-core, the optimizer and every role run as they would on a GPU, in one process,
on a machine without one. An operation on tensors of two devices fails as it would there.

    from aligner_plan.dry.guard import load_guard
    load_guard()                                     # before torch is imported
    from aligner_plan.dry.device import DryDevice
    with DryDevice(world_size=8) as device, device.record() as record:
        ...                                          # build a role, train it
    record.peak_bytes, record.flops, record.collectives, record.host_reads
"""
