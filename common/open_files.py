"""The limit of open files."""

from __future__ import annotations

import sys


def allow_open_files(count: int) -> bool:
    """Raise this process's limit of open files to ``count`` or, if it is lower, to the hard limit.

    Return whether the limit was raised.
    """
    if sys.platform == "win32":
        return False
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return True
