"""The memory of a cache: its dtypes, layout, allocation, copies, and values that share the memory of keys."""

import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyattn import ops
from pyattn.cache.eight_bits import bytes_of, check_kv_dtype, quantized, rotation_for
from pyattn.cache.pages import table_for
from pyattn.cache.ring_buffer import slots_of, window_of
from pyattn.options.checks import check_sizes, check_tensor, check_type, device_of, shown
from pyattn.options.tensor_types import KeyCache

Cache = TypeVar("Cache")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_dtype(dtype: torch.dtype) -> None:
    """TypeError unless ``dtype`` is one of :data:`DTYPES`."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"pyattn: dtype must be a torch.dtype, such as torch.float32, got {shown(dtype)}")
    if dtype not in DTYPES:
        raise TypeError(f"pyattn: dtype must be float64, float32, bfloat16 or float16, got {dtype}")


def check_shared(shared_values: bool, head_dim: int, head_dim_v: int) -> None:
    """TypeError or ValueError unless values of ``head_dim_v`` columns can be part of the keys, if they are to be."""
    check_type("shared_values", shared_values, bool)
    if shared_values and head_dim_v > head_dim:
        raise ValueError(
            f"pyattn: head_dim_v must not exceed head_dim with shared_values=True, got {head_dim_v} and {head_dim}"
        )


class Storage(KeyCache):
    """Keys, values and lengths of the sequences, as :class:`pyattn.KVCache` describes them.

    Values have separate memory or are the first columns of the keys.
    """

    _v: Tensor | int
    """The values' own memory, or of how many columns of the keys they consist."""

    kv_dtype: torch.dtype | None = None
    """torch.int8 or torch.float8_e4m3fn if keys and values are stored in 8 bits."""

    rotation: int = 1
    """The columns of a block in which keys of int8 are rotated."""

    k_scale: Tensor | None = None
    _v_scale: Tensor | None = None
    """The scale of each row of k, and of v if it has separate memory, like k and v with one column."""

    user: "weakref.ref[Any] | None" = None
    """The module that appended the tokens; copies that are pickled or deep-copied forget it."""

    def __init__(
        self,
        batch: int,
        num_heads_kv: int,
        max_seqlen: int,
        head_dim: int,
        head_dim_v: int | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        page_size: int | None,
        window: tuple[int, int] | None,
        shared_values: bool,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        dtype = torch.get_default_dtype() if dtype is None else dtype
        sizes = {"batch": batch, "num_heads_kv": num_heads_kv}
        for columns in ({"head_dim": head_dim}, {"head_dim_v": head_dim_v}):
            check_sizes(max_seqlen=max_seqlen, **sizes, **columns)
            if page_size is not None:
                check_sizes(page_size=page_size, **sizes, **columns)
        check_dtype(dtype)
        check_shared(shared_values, head_dim, head_dim_v)
        device = device_of(device)
        check_kv_dtype(kv_dtype, dtype, device or torch.get_default_device())
        self.max_seqlen = max_seqlen
        self.window: tuple[int, int] | None = window_of(window, max_seqlen)
        self.page_size = page_size
        if page_size is not None and self.window is not None:
            raise NotImplementedError(
                f"pyattn: a cache with a window has no pages, got page_size={page_size} and window={self.window}"
            )
        with torch.inference_mode(False):  # so the cache can be used after inference mode ends
            self.lengths: Tensor = torch.zeros(batch, dtype=torch.int64, device=device)
            self.starts: Tensor = torch.zeros_like(self.lengths)
            self._ragged, self._last = False, self.lengths.new_zeros(3, batch)
            self.block_table: Tensor | None = (
                None if page_size is None else table_for(self.lengths, max_seqlen, page_size)
            )
            slots = max_seqlen if self.window is None else slots_of(max_seqlen)
            shape = (batch, num_heads_kv, slots)
            if page_size is not None and self.block_table is not None:
                shape = (num_heads_kv, self.block_table.numel(), page_size)
            stored = dtype if kv_dtype is None else kv_dtype
            self.k: Tensor = allocated((*shape, head_dim), stored, device, page_size)
            self._v = head_dim_v if shared_values else allocated((*shape, head_dim_v), stored, device, page_size)
            if kv_dtype is None:
                return
            self.kv_dtype, self._dtype = kv_dtype, dtype
            self.rotation = rotation_for(kv_dtype, head_dim, head_dim_v, shared_values)
            self.k_scale = allocated((*shape, 1), torch.float32, device, page_size)
            self._v_scale = None if shared_values else allocated((*shape, 1), torch.float32, device, page_size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries, and of the keys and values that are appended."""
        return self.k.dtype if self.kv_dtype is None else self._dtype

    @property
    def v_scale(self) -> Tensor | None:
        """The scales of v; None unless values are stored in 8 bits."""
        return self.k_scale if self._v_scale is None else self._v_scale

    @property
    def last_append(self) -> Tensor | None:
        """int64 (3, B) after an append with ``lengths``: its number of rows, each sequence's length before and after.

        None after a reset or an append without lengths: cache.lengths then tells where the newest rows are.
        """
        return self._last if self._ragged else None

    @property
    def v(self) -> Tensor:
        """The values, like k with their own number of columns."""
        return self._v if isinstance(self._v, Tensor) else self.k[..., : self._v]

    @v.setter
    def v(self, v: Tensor) -> None:
        self._v = v

    @property
    def shared_values(self) -> bool:
        """Whether v is the first columns of k."""
        return not isinstance(self._v, Tensor)

    @property
    def written(self) -> tuple[Tensor, Tensor]:
        """k and v for an operator that writes them; shared values are written with k, so v then has no columns."""
        k, v = self.k, self._v if isinstance(self._v, Tensor) else self.k.new_empty(*self.k.shape[:-1], 0)
        return (k, v) if self.kv_dtype is None else (bytes_of(k), bytes_of(v))

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """lengths, and starts or the block table: what operators change beside the storage."""
        return self.lengths, self.starts if self.block_table is None else self.block_table

    @property
    def parts(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """The tensors that operators change: ``(*written, *state)``, and in 8 bits the scales with a copied state.

        With the copy, an operator does to the scales what it has done to the values.
        """
        values = *self.written, *self.state
        if self.k_scale is None:
            return [values]
        v_scale = self.k_scale.new_empty(*self.k_scale.shape[:-1], 0) if self._v_scale is None else self._v_scale
        return [values, (self.k_scale, v_scale, self.state[0].clone(), self.state[1].clone())]

    def quantized(self, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """New rows of k and v in 8 bits for each of :attr:`parts`: values, then scales."""
        (k_rows, k_scale), (v_rows, v_scale) = self.rows_of("k", k), self.rows_of("v", v)
        return [(k_rows, v_rows), (k_scale, v_scale[..., : int(not self.shared_values)])]

    def rows_of(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """The values and scales of new rows of k or v in 8 bits; TypeError for another dtype than the cache's."""
        assert self.kv_dtype is not None
        if x.dtype != self.dtype:
            raise TypeError(f"pyattn: {name} must have the cache's dtype {self.dtype}, got {x.dtype}")
        if x.dim() and x.shape[-1] != (self.k if name == "k" else self.written[1]).shape[-1]:
            return bytes_of(x.new_zeros(x.shape, dtype=torch.int8)), x.new_zeros(*x.shape[:-1], 1)  # shapes are refused
        return quantized(x, self.kv_dtype, self.rotation if name == "k" else 1)

    def new_values(self, k: Tensor, v: Tensor | None) -> Tensor:
        """The values to append with ``k``; ValueError for a ``v`` where values are shared."""
        if isinstance(self._v, int):
            if v is None:
                return k[..., :0]
            raise ValueError(
                f"pyattn: v must be left out, because the cache's values are the first {self._v} columns of k, "
                f"got {shown(v)}"
            )
        if v is None:
            raise TypeError("pyattn: v must be Tensor, got None")
        check_tensor("v", v)
        return v

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name != "user"}
        for name in ("k", "_v"):  # pickle knows no storage of float8
            if self.kv_dtype is not None and isinstance(state[name], Tensor):
                state[name] = bytes_of(state[name])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Lets a cache that was unpickled or deep-copied in inference mode be used after the mode ends."""
        with torch.inference_mode(False):
            for name, value in state.items():
                setattr(self, name, value.clone() if isinstance(value, Tensor) and value.is_inference() else value)
            for name in ("k", "_v"):
                if self.kv_dtype is not None and isinstance(stored := getattr(self, name), Tensor):
                    setattr(self, name, stored.view(self.kv_dtype))


def allocated(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | None, page_size: int | None
) -> Tensor:
    """Zeros (B, Hkv, slots, D), or, for shape (Hkv, pages, page_size, D), zeros (pages, page_size, Hkv, D)."""
    made = torch.empty(shape, dtype=dtype, device=device)
    ops.cache_clear(made)
    # A head's rows of adjacent pages are contiguous, which is read fastest.
    return made if page_size is None else made.permute(1, 2, 0, 3)


def copied(cache: Cache, device: torch.device, dtype: torch.dtype) -> Cache:
    """A cache with copies of all tensors, k and v in ``dtype`` unless they have 8 bits; other attributes are shared."""
    made = object.__new__(type(cache))
    with torch.inference_mode(False):
        for name, value in vars(cache).items():
            if name in ("k", "_v") and isinstance(value, Tensor):
                stored = dtype if vars(cache).get("kv_dtype") is None else value.dtype
                storage = torch.empty_like(value, dtype=stored, device=device)
                ops.cache_clear(storage)
                setattr(made, name, storage.copy_(value))
            else:
                setattr(made, name, value.to(device, copy=True) if isinstance(value, Tensor) else value)
        if "_dtype" in vars(made):
            made._dtype = dtype  # type: ignore[attr-defined]
    return made


def over(
    kind: type[Cache], k: Tensor, v: Tensor, lengths: Tensor, block_table: Tensor | None, max_seqlen: int
) -> Cache:
    """A cache whose tensors are these, without a window, to read alone."""
    made = object.__new__(kind)
    page_size = None if block_table is None else k.shape[1]
    values = {"k": k, "_v": v, "lengths": lengths, "block_table": block_table, "page_size": page_size}
    values |= {"starts": torch.zeros_like(lengths), "max_seqlen": max_seqlen, "window": None}
    vars(made).update(values, _ragged=False, _last=lengths.new_zeros(3, *lengths.shape))
    return made
