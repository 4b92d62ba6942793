"""Lets the tests here import what they share, `callback_runs`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
