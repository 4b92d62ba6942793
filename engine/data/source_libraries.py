"""Properties of streams from Hugging Face Datasets, WebDataset and MosaicML Streaming, without importing them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Names of private classes of Hugging Face Datasets. If it renames one, `explain_state_gap` gives no reason any more.
_SHUFFLE_BUFFER = "BufferShuffledExamplesIterable"
_MAPPED = "MappedExamplesIterable"


def unpack(dataset: Any) -> Any:
    """Return the stream that a `PackedStream` reads; any other dataset is returned unchanged."""
    return getattr(dataset, "packed_source", dataset)


def split_over(dataset: Any) -> int:
    """Return the number of ranks over which ``split_dataset_by_node`` split a Hugging Face stream; 0 if not split."""
    dataset = unpack(dataset)
    distributed = getattr(dataset, "_distributed", None) if _name_library(dataset) == "datasets" else None
    return int(getattr(distributed, "world_size", 0))


def explain_state_gap(dataset: Any) -> str:
    """Return the reason why a stream's state does not contain its exact position; "" if no reason is known.

    The documentation of Hugging Face's ``IterableDataset.state_dict`` describes these cases.
    """
    dataset = unpack(dataset)
    if _name_library(dataset) != "datasets":
        return ""
    names = {type(part).__name__: part for part in iter_parts(dataset)}
    if _SHUFFLE_BUFFER in names:
        return f"the state of {type(dataset).__name__} does not contain its shuffle buffer"
    formatting = getattr(dataset, "_formatting", None)
    if getattr(names.get(_MAPPED), "batched", False) and getattr(formatting, "is_table", False):
        return f"the state of {type(dataset).__name__} skips a batch after a batched map of tables"
    return ""


def copies_state(owner: Any) -> bool:
    """Return whether an object's ``state_dict`` comes from a library that returns a copy."""
    return type(owner).state_dict.__module__.partition(".")[0] in ("datasets", "torchdata", "streaming", "treadle")


def explain_not_repeatable(dataset: Any) -> str:
    """Return why a stream without a state yields different samples when it is read again; "" if no reason is known."""
    dataset = unpack(dataset)
    if any(kind.__module__.partition(".")[0] == "streaming" for kind in type(dataset).__mro__):
        return "StreamingDataset counts its epochs on its own. Read it through streaming.StreamingDataLoader"
    if _name_library(dataset) != "webdataset":
        return ""
    for part in iter_parts(dataset):
        arguments = getattr(part, "kw", {})
        if getattr(getattr(part, "f", None), "__name__", "") == "_shuffle":
            seed_arguments = (arguments.get("seed"), arguments.get("rng"), *getattr(part, "args", ())[2:])
            if all(value is None for value in seed_arguments):
                return "WebDataset.shuffle(n) takes its seed from the clock. Pass seed=..., or use detshuffle"
        if type(part).__name__ == "ResampledShards" and not part.deterministic:
            return (
                "WebDataset(resampled=True) takes its seed from the clock. Use ResampledShards(urls, "
                "deterministic=True)"
            )
    return ""


def iter_parts(dataset: Any) -> Iterator[Any]:
    """Yield a Hugging Face or WebDataset stream and its nested stages; nothing for other datasets."""
    library, visited, waiting = _name_library(dataset), set[int](), [dataset]
    for part in waiting if library in ("datasets", "webdataset") else ():  # the list grows during the loop
        if id(part) in visited:
            continue
        visited.add(id(part))
        yield part
        for value in vars(part).values():
            within = value if isinstance(value, list | tuple) else (value,)
            waiting += [
                candidate
                for candidate in within
                if _name_library(candidate) == library and hasattr(candidate, "__dict__")
            ]


def _name_library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]
