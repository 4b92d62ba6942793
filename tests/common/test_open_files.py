"""The limit of open files is raised where a process needs more, up to the hard limit."""

import resource

import pytest
from treadle.common.open_files import allow_open_files

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 3000),
        (1024, 2000, 2000),
        (1024, INFINITE, 3000),
        (4096, 8192, None),
        (3000, 3000, None),
        (INFINITE, INFINITE, None),
    ],
)
def test_the_limit_is_raised_as_far_as_needed_and_allowed(soft, hard, raised, monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: limits.append(values))
    assert allow_open_files(3000) is (raised is not None)
    assert limits == ([] if raised is None else [(raised, hard)])
