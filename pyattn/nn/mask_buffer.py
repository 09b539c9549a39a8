"""The plain modules' causal mask: in state dicts and on request, but not in memory."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pyattn.nn.checks import check_alone, check_mask
from pyattn.nn.read_only import ReadOnlyMask
from pyattn.options.checks import check_sizes, check_type, shown

BLOCK = 2**20
"""Entries of a mask that are compared at a time: temporaries of a few MB, whatever its size."""

LONGEST_WRITTEN = 2048
"""The longest context whose mask is saved by default: 17 MB per layer in float32; 16,384 would take 1,074 MB."""


def causal_mask(T: int, device: torch.device | str | None = None) -> Tensor:
    """The causal mask as :class:`pyattn.nn.Attention` takes it: bool (1, 1, T, T), True = masked out.

    >>> causal_mask(3)[0, 0].int().tolist()
    [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    """
    return torch.ones(1, 1, T, T, dtype=torch.bool, device=device).triu(1)


def _first_difference(mask: Tensor) -> tuple[int, int] | None:
    """The first (query, key) where ``mask`` (T, T) is not causal: 1 or True for key > query, 0 or False elsewhere."""
    length = mask.shape[0]
    key = torch.arange(length, device=mask.device)
    rows = max(1, BLOCK // max(1, length))
    for begin in range(0, length, rows):
        block = mask[begin : begin + rows]
        differs = block != (key > key[begin : begin + rows, None])
        if differs.any():
            query, at = divmod(int(differs.flatten().to(torch.uint8).argmax()), length)
            return begin + query, at
    return None


def _what_is_wrong(key: str, mask: object, length: int) -> str | None:
    """Says why ``mask``, found in a state dict under ``key``, is not the causal mask; None if it is."""
    if not isinstance(mask, Tensor):
        return f"pyattn: {key} must be Tensor, got {shown(mask)}"
    if mask.shape != (length, length):
        hint = f"; a causal mask may be deleted: del state_dict[{key!r}], or strict=False" if _is_square(mask) else ""
        return f"pyattn: {key} must have shape {(length, length)}, got {tuple(mask.shape)}{hint}"
    if mask.is_meta or isinstance(mask, FakeTensor):  # no values
        return None
    at = _first_difference(mask)
    if at is None:
        return None
    return f"pyattn: {key} must be the causal mask, 1 above the diagonal and else 0, got {mask[at].item()} at {at}"


def _is_square(mask: Tensor) -> bool:
    return mask.dim() == 2 and mask.shape[0] == mask.shape[1]


def _is_causal(mask: object) -> bool:
    """Whether ``mask`` is the causal mask of some context."""
    if not isinstance(mask, Tensor) or not _is_square(mask) or mask.is_meta or isinstance(mask, FakeTensor):
        return False
    return _first_difference(mask) is None


class _Unexpected(str):
    """A key of a state that strict loading refuses, with its reason: torch alone knows whether loading is strict."""

    def __new__(cls, key: str, reason: str) -> "_Unexpected":
        made = super().__new__(cls, key)
        made.reason = reason
        return made

    reason: str

    def __format__(self, _: str) -> str:
        return self.reason


class CausalMask(nn.Module):
    """A causal module of the book, whose ``mask`` (context_length, context_length) takes no memory.

    ``mask`` is 1 above the diagonal (masked out) and 0 elsewhere, in the parameters' dtype or ``mask_dtype``, computed
    whenever it is read. In state dicts it takes the place of the plain module's buffer:

    - ``persistent_mask``, a keyword of the constructor and an attribute that may be set, decides whether saving writes
      it under the key ``mask``. True: always, False: never, None, the default: up to a context of 2,048. Pass True if a
      plain module with a longer context is to load the state with ``strict=True``.
    - Loading takes states with and without ``mask``, both with ``strict=True``, whatever ``persistent_mask`` is. A mask
      with another shape or other values is refused; the error names the first value that differs. The causal mask of
      another context may be deleted from the state, and ``strict=False`` ignores it.
    - With None, up to a context of 2,048, saving follows the last state loaded, so a state without ``mask``, from a
      plain module that registers it with ``persistent=False``, is saved without it again. A state that also lacks
      parameters, as adapters save, changes nothing.

    Writing to what ``mask`` returns, as in ``m.mask.zero_()``, raises: it is not held. A ``mask`` that is registered or
    assigned, for example by a subclass, becomes an ordinary buffer: it is saved, unless ``persistent_mask`` is False,
    loaded like any other, and applied as the plain module applies it (nonzero = masked out). Assigning None makes the
    module causal again.
    """

    mask_in_plain_states = True
    """Whether the plain module's state dicts have the mask."""
    mask_dtype: torch.dtype | None = None
    """The mask's dtype; None: the parameters'."""

    def __init__(self, context_length: int, persistent_mask: bool | None = None) -> None:
        super().__init__()
        check_sizes(1, context_length=context_length)
        self.context_length = context_length
        self._state_had_mask = True
        self.persistent_mask = persistent_mask

    @property
    def persistent_mask(self) -> bool:
        """Whether saving writes the causal mask."""
        if self._persistent_mask is None:
            usual = self.mask_in_plain_states and self.context_length <= LONGEST_WRITTEN
            return usual and self._state_had_mask
        return self._persistent_mask

    @persistent_mask.setter
    def persistent_mask(self, persistent_mask: bool | None) -> None:
        check_type("persistent_mask", persistent_mask, bool, type(None))
        self._persistent_mask = persistent_mask
        if (own := self._own_mask) is not None:
            self.register_buffer("mask", own, self._state_had_mask)

    @property
    def _own_mask(self) -> Tensor | None:
        return self._buffers.get("mask")

    @property
    def mask(self) -> Tensor:
        """``triu(ones(T, T), diagonal=1)`` with T = context_length, or the buffer that was registered in its place.

        The first is computed when read and raises when written to: :class:`pyattn.nn.read_only.ReadOnlyMask`.
        """
        if (own := self._own_mask) is not None:
            return own
        made = self._causal_mask()
        plain = torch.compiler.is_compiling() or made.is_meta or isinstance(made, FakeTensor)
        return made if plain else made.as_subclass(ReadOnlyMask)

    @mask.setter
    def mask(self, mask: Tensor | None) -> None:
        self.register_buffer("mask", mask, self._state_had_mask)

    def _causal_mask(self) -> Tensor:
        like = next(self.parameters(), torch.empty(0))
        shape = (self.context_length, self.context_length)
        return torch.ones(shape, dtype=self.mask_dtype or like.dtype, device=like.device).triu_(1)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Registers a buffer as every module does; the name ``mask`` is allowed although it is a property."""
        if name == "mask":
            self._buffers.setdefault(name, None)
            persistent = persistent if self._persistent_mask is None else self._persistent_mask
            tensor = tensor.clone() if isinstance(tensor, ReadOnlyMask) else tensor
        super().register_buffer(name, tensor, persistent)

    def described_mask(self) -> dict[str, object]:
        """The constructor's arguments for :func:`pyattn.nn.repr.described`."""
        return {"context_length": self.context_length, "persistent_mask": self._persistent_mask}

    def mask_options(self, x: Tensor, cached: bool = False) -> dict[str, Any]:
        """Options that mask attention over ``x`` (batch, seqlen, d_in): causal, or the buffer registered as mask.

        After ``cached`` tokens only the causal mask works: NotImplementedError with a registered one.
        """
        if (own := self._own_mask) is None:
            return {}
        if cached:
            raise NotImplementedError(
                f"pyattn: an assigned mask is not supported with kv_cache, got one of shape {tuple(own.shape)}"
            )
        check_alone(x, mask=own)
        batch, seqlen = x.shape[:2]
        masked = check_mask(own.bool()[:seqlen, :seqlen], (batch, 1, seqlen, seqlen))
        return {"causal": False, "own_mask": ~masked}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.persistent_mask and self._own_mask is None:
            destination[prefix + "mask"] = self._causal_mask()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        key = prefix + "mask"
        if self._own_mask is None and (
            key in state_dict or all(prefix + name in state_dict for name, _ in self.named_parameters())
        ):
            # States of a long context lack the mask by default, which says nothing about a mask that is assigned.
            self._state_had_mask = key in state_dict or self.context_length > LONGEST_WRITTEN
            if key in state_dict:
                mask = state_dict.pop(key)
                wrong = _what_is_wrong(key, mask, self.context_length)
                if wrong is not None:
                    unexpected, error_msgs = rest[-2:]
                    if _is_causal(mask):
                        unexpected.append(_Unexpected(key, wrong))
                    else:
                        error_msgs.append(wrong)
        super()._load_from_state_dict(state_dict, prefix, *rest)
