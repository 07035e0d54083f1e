"""The dry device: the library's code at full size on GPU tensors without memory.

Tensors are PyTorch's fake tensors with ``device="cuda"``, and process groups are PyTorch's fake
groups of any size. megatron-core, the optimizer and every role run in one process as on a GPU, on a
machine without one. An operation on tensors of two devices fails as on a GPU.

    from aligner_plan.dry.guard import load_guard
    load_guard()                                     # before torch is imported
    from aligner_plan.dry.device import DryDevice
    with DryDevice(world_size=8) as device, device.record() as record:
        ...                                          # build a role, train it
    record.peak_bytes, record.flops, record.collectives, record.host_reads
"""
