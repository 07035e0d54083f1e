"""Cases of `test_dry_rules`: what the dry device says of operations that a GPU refuses."""

import torch

from aligner.dry.device import DryDevice
from aligner.errors import DryDeviceError


def said(name, deterministic=False):
    """The error of a case by name; "" where there is none."""
    try:
        with DryDevice():
            torch.use_deterministic_algorithms(deterministic)
            CASES[name]()
    except DryDeviceError as error:
        return str(error)
    return ""


def matrix(dtype=torch.bfloat16):
    return torch.ones(8, 8, device="cuda", dtype=dtype)


CASES = {
    "product": lambda: matrix() @ matrix(torch.float32),
    "norm": lambda: torch.nn.functional.layer_norm(
        matrix(), (8,), matrix(torch.float32)[0], matrix(torch.float32)[0]
    ),
    "product with wide sums": lambda: torch.mm(
        torch.empty_like(matrix()), matrix(), out_dtype=torch.float32
    ),
    "wide matrix": lambda: matrix().double(),
    "wide vector": lambda: matrix()[0].double(),
    "sum of floats": lambda: matrix().cumsum(1),
    "sum of numbers": lambda: matrix().long().cumsum(1),
    "sum of numbers as floats": lambda: matrix().long().cumsum(1, dtype=torch.float32),
    "sum on the host": lambda: torch.ones(8).cumsum(0),
    "histogram": lambda: torch.histc(matrix(torch.float32), 4, 0, 4),
    "put": lambda: matrix().put_(matrix()[0].long(), matrix()[0]),
}
