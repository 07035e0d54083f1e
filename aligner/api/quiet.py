"""Silence of the libraries below while a model is imported and built."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warnings of megatron-core and NeMo about optional packages.

    The start-up report of a run lists the packages that are missing.
    """
    logging.getLogger("nv_one_logger").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
