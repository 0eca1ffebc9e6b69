"""Which Cotenant this is."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache
def version() -> str:
    """The installed version, or 0 from a bare checkout."""
    try:
        return metadata.version("cotenant")
    except metadata.PackageNotFoundError:
        return "0"
