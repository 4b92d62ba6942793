"""The limit of open files, which sockets and mapped files count towards."""

from __future__ import annotations

import sys


def allow_open_files(count: int) -> bool:
    """Raise this process's limit of open files to ``count``, as far as the system permits.

    Args:
        count: Number of files that the process may need at the same time.

    Returns:
        Whether the limit was raised.
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
