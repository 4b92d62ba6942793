"""Context manager that restores the RNG states and signal handlers that a tracking service changes."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the RNG states of Python, NumPy and PyTorch (CPU) and the signal handlers when the block ends.

    The states of NumPy and PyTorch are restored only if these packages were imported before the block. The handlers are
    restored only in the main thread.

    Opening a run with most services draws from Python's RNG, so training would not be reproducible. ClearML and SwanLab
    install signal handlers, which would replace Treadle's. Within the block, Python's RNG has a random seed, so
    that two runs with the same seed do not draw the same random names.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    # Only the main thread may set handlers, and None stands for one that Python did not install and cannot restore.
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in signal.valid_signals()} if in_main_thread else {}
    random.seed()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
