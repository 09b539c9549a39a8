"""The setting that makes a row's bits independent of the rows, sequences and threads that share its call."""

import os
from types import TracebackType

from pyattn import ops
from pyattn.locks import Lock

VARIABLE = "PYATTN_ROW_INVARIANT"


class _Setting:
    """Sets row invariance back to ``before`` at the end of a ``with`` statement."""

    def __init__(self, before: bool) -> None:
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _set(self._before)


def set_row_invariant(row_invariant: bool) -> _Setting:
    """Sets whether the bits of a row depend on that row alone, on the CPU; default False.

    A row's out and lse are then a function of its query, the keys and values that it sees, their places in their
    sequence, and its options. They do not depend on how many rows, heads or sequences share the call, on the chunks in
    which a prompt is read, on packing, on whether keys lie in a tensor, a cache or pages, or on the number of threads:
    a token that is decoded has the bits of the same token in a whole prompt, in training or among drafts. The same
    holds for the gradient of a row's q; those of k, v and learned options are sums over rows. Each instruction set has
    its own bits.

    Keys count from the first one of their sequence in the call, visible or hidden. So rows differ by rounding where
    other documents or padding come before them (key_ranges, padding on the left), and where a draft tree stores its
    tokens in other slots. With ``selected``, keys count by their places in the row's list. Dropout draws by the place
    in the call.

    The setting holds for the whole process and is read when forward runs; a backward follows its forward, except for
    :func:`pyattn.parts.attention_backward`, which follows the setting. A checkpoint (torch.utils.checkpoint) runs
    forward again during backward, under the setting of that moment: keep it until backward has run. Compiled graphs
    follow it too. As a context manager, it is set back at the end::

        with pyattn.set_row_invariant(True):
            out = pyattn.attention(q, k, v)

    The environment variable PYATTN_ROW_INVARIANT=1 sets it at import.

    Raises:
        TypeError: any type but bool.
        NotImplementedError: while it is set, from calls on a GPU, over a ring buffer (it moves its window to the front
            of its slots, so a key's slot no longer tells its position), and over several ranks' positions
            (ring_attention, ulysses_attention and their caches), all before they compute or send anything.
        ValueError: at import, PYATTN_ROW_INVARIANT is neither 0 nor 1.

    >>> q, k, v = torch.randn(3, 1, 8, 300, 64)
    >>> with pyattn.set_row_invariant(True):
    ...     whole, last = pyattn.attention(q, k, v), pyattn.attention(q[:, :, -1:], k, v)
    >>> torch.equal(whole[:, :, -1:], last)
    True
    """
    if not isinstance(row_invariant, bool):
        raise TypeError(f"pyattn: row_invariant must be a bool, got {type(row_invariant).__name__}")
    with _lock:
        before = _row_invariant
        _set(row_invariant)
    return _Setting(before)


def row_invariant() -> bool:
    """Whether the bits of a row depend on that row alone, as :func:`set_row_invariant` set it."""
    return _row_invariant


def refuse_row_invariance(what: str) -> None:
    """NotImplementedError for ``what``, while rows are invariant."""
    if _row_invariant:
        raise NotImplementedError(f"pyattn: {what} must not be called with set_row_invariant(True)")


def _set(row_invariant: bool) -> None:
    global _row_invariant
    with _lock:  # both hold the setting of one thread
        _row_invariant = row_invariant
        ops.set_row_invariant(row_invariant)


def _from_environment() -> bool:
    value = os.environ.get(VARIABLE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"pyattn: {VARIABLE} in the environment must be 0 or 1, got {value!r}")
    return value == "1"


_lock = Lock()
_row_invariant = False
_set(_from_environment())
