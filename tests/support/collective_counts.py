"""What a process sends, written down by its operations."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

# Operations, what they are, and which argument holds the whole.
WHOLE = {
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.allreduce_": ("all_reduce", 0),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
}


class CountedCollectives(TorchDispatchMode):
    """Counts collectives by kind, and the bytes of what they gather, scatter or reduce."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "from_local") for t in types):
            return NotImplemented  # a DTensor's parts come by themselves
        name = str(func._overloadpacket)
        if name in WHOLE:
            kind, place = WHOLE[name]
            tensors = args[place] if isinstance(args[place], list) else [args[place]]
            self.found[kind] += 1
            self.found[f"{kind} bytes"] += sum(t.numel() * t.element_size() for t in tensors)
        elif name.startswith(("c10d.", "_c10d_functional.")) and "wait" not in name and "wrap" not in name:
            raise AssertionError(name)
        return func(*args, **(kwargs or {}))
