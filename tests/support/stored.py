"""Checkpoints that are written and read part by part, without the objects of an Accelerator."""

import json
import os
from pathlib import Path

from treadle.engine.checkpoint import OpenCheckpoint, encode_part, filesystem, read_manifest, read_part
from treadle.engine.checkpoint.store import DiskSave
from treadle.strategies.processes import identify_process

__all__ = ["DEAD", "commit", "edit_manifest", "open_part", "read_part", "replace_file", "write_part"]

DEAD = f"{identify_process().split('-')[0]}-1-1"
"""A process of this machine that has ended, as it stands in the names of unfinished saves."""


def write_part(target, name, state, writer=""):
    """Write one part next to its target, and return the entries of its files for `commit`."""
    return DiskSave(target, writer).write(encode_part(name, state))


def commit(target, files, info, others=False):
    DiskSave(target).commit(files, info, others)
    return Path(os.path.abspath(target))


def open_part(path, name):
    """A part with unread tensors, and its notes; nothing is recovered or verified before."""
    part = OpenCheckpoint(path, read_manifest(path)).part(name)
    return part.unread(), part.notes


def edit_manifest(path, **changes):
    document = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(document | changes))


def replace_file(path, name, content):
    """Replace a file and make the manifest agree, as somebody who builds a hostile checkpoint would."""
    (path / name).write_bytes(content)
    files = json.loads((path / "manifest.json").read_text())["files"]
    edit_manifest(path, files=files | {name: filesystem.describe(path / name)})
