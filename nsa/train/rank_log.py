"""Which process of a run with several ranks warns: one, unless what it warns of may be its own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from nsa import settings

log = logging.getLogger("nsa")


def one_voice() -> AbstractContextManager[None]:
    """While a run starts, only the first process on a machine warns: the others would warn of the same."""
    if settings.first_on_machine():
        return nullcontext()
    return without_warnings(lambda record: record.levelno >= logging.ERROR)


def named_log(rank: int) -> AbstractContextManager[None]:
    """While a run goes on, what another rank than the first logs may be of its GPU or its data alone: it is kept and
    named. Python's warnings are of the code, and the first rank's are enough."""

    def name(record: logging.LogRecord) -> bool:
        record.msg = f"rank {rank}: {record.msg}"
        return True

    return nullcontext() if rank == 0 else without_warnings(name)


@contextmanager
def without_warnings(log_filter: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    log.addFilter(log_filter)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.removeFilter(log_filter)
