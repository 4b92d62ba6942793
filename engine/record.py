"""The data of an object whose class is not stored with it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    """Inert stand-in for an object in a stored state: `codec.decode` returns the record, never the object.

    Attributes:
        kind: what the reader may build from it, such as ``"enum"``.
        name: the name of the object's class, as text.
        content: the object's data, anything that `codec.encode` accepts.
    """

    kind: str
    name: str
    content: Any
