"""Suppresses warnings of megatron-core and NeMo."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings about missing optional packages in the ``with`` block."""
    logging.getLogger("nv_one_logger").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
