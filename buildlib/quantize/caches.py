"""Keys and values that the graphs of several models hand to each other."""

from collections.abc import Mapping

from buildlib.encodings.grid import activation_grid
from buildlib.encodings.model import Encodings
from buildlib.errors import EncodingsError
from buildlib.graph import interface
from buildlib.quantize.activations import different_grids, same_grid


def check_same_caches(models: Mapping[str, Encodings]) -> None:
    """See that all models mean the same by the integers of their caches.

    Genie gives every graph the same key and value buffers: what the prefill graph writes, the
    decode graph reads, whichever model each of them was made of.

    Args:
        models: complete encodings, by what messages call the model.

    Raises:
        EncodingsError: names the cache, and the model in which it differs from the first.
    """
    (first, reference), *others = models.items()
    known = reference.by_name()
    for name, encodings in others:
        for cache, encoding in encodings.by_name().items():
            if not interface.is_kv(cache) or cache not in known:
                continue
            ours, theirs = activation_grid(known[cache]), activation_grid(encoding)
            if not same_grid(ours, theirs):
                reason = (
                    f"{name} has it on another grid than {first}, and both feed one cache: "
                    f"{different_grids(theirs, ours)}; export them with the same encodings of it"
                )
                raise EncodingsError(cache, reason)
