"""Promise: state dicts go both ways between native and plain modules, and no native module holds a T x T tensor."""

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from support.cases import allocated
from support.modules import (
    ARGUMENTS,
    CONTEXT_LENGTH,
    D_IN,
    assert_same,
    class_of,
    doubles,
    every_module,
    output,
    pair,
    sequences,
)

from pyattn import nn, reference

MASKED = ["CausalAttention", "MultiHeadAttentionWrapper", "MultiHeadAttention"]


def assert_same_state(native: torch.nn.Module, plain: torch.nn.Module) -> None:
    ours, theirs = native.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype
        assert ours[key].device == value.device
        assert value.is_meta or torch.equal(ours[key], value), key


@every_module
def test_a_seed_gives_the_same_state(name):
    assert_same_state(*pair(name))


@every_module
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_follows_to(name, dtype):
    native, plain = pair(name)
    assert_same_state(native.to(dtype), plain.to(dtype))


@every_module
@pytest.mark.parametrize("assign", [False, True])
def test_loads_strictly_both_ways(name, assign):
    native, plain = pair(name)
    fresh_native, fresh_plain = class_of(name)(*ARGUMENTS[name]), class_of(name, reference)(*ARGUMENTS[name])
    fresh_native.load_state_dict(plain.state_dict(), strict=True, assign=assign)
    fresh_plain.load_state_dict(native.state_dict(), strict=True, assign=assign)
    assert_same_state(fresh_native, plain)
    assert_same_state(native, fresh_plain)


def test_loads_inside_a_model_and_through_a_file():
    native = torch.nn.Sequential(*(nn.MultiHeadAttention(8, 8, 6, 0.0, 2) for _ in range(2)))
    plain = torch.nn.Sequential(*(reference.MultiHeadAttention(8, 8, 6, 0.0, 2) for _ in range(2)))
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    native.load_state_dict(state, strict=True)
    assert "1.mask" in state, "loading takes nothing from the caller's dict"
    assert_same_state(native, plain)


def mask_key(module: torch.nn.Module) -> str:
    return next(key for key in module.state_dict() if key.endswith("mask"))


@pytest.mark.parametrize("name", MASKED)
def test_loading_checks_the_masks_shape(name):
    native, plain = pair(name)
    key = mask_key(plain)
    shape = rf"pyattn: {key} must have shape \({CONTEXT_LENGTH}, {CONTEXT_LENGTH}\), got \(3, 4\)"
    with pytest.raises(RuntimeError, match=shape):
        native.load_state_dict(plain.state_dict() | {key: torch.ones(3, 4)})
    with pytest.raises(RuntimeError, match=rf"pyattn: {key} must be Tensor, got 'causal'"):
        native.load_state_dict(plain.state_dict() | {key: "causal"})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "masks"'):
        native.load_state_dict(plain.state_dict() | {"masks": torch.ones(1)})


CAUSAL = torch.ones(CONTEXT_LENGTH, CONTEXT_LENGTH).triu(1)
OTHER_MASKS = {
    "zeros": (torch.zeros_like(CAUSAL), "got 0.0 at (0, 1)"),
    "ones": (torch.ones_like(CAUSAL), "got 1.0 at (0, 0)"),
    "the seen": (~CAUSAL.bool(), "got True at (0, 0)"),
    "a window of 3": (CAUSAL + CAUSAL.new_ones(CAUSAL.shape).tril(-3), "got 1.0 at (3, 0)"),
    "the last": (CAUSAL - torch.eye(CONTEXT_LENGTH) * (torch.arange(CONTEXT_LENGTH) == 18), "got -1.0 at (18, 18)"),
    "scores": (torch.full_like(CAUSAL, -torch.inf).triu(1), "got -inf at (0, 1)"),
    "nan": (CAUSAL.masked_fill(torch.eye(CONTEXT_LENGTH) > 0, torch.nan), "got nan at (0, 0)"),
}


@pytest.mark.parametrize("block", [1, 100, 2**20])
@pytest.mark.parametrize(("mask", "got"), OTHER_MASKS.values(), ids=OTHER_MASKS)
@pytest.mark.parametrize("strict", [False, True])
def test_loading_checks_the_masks_values(mask, got, block, strict, monkeypatch):
    monkeypatch.setattr(nn.mask_buffer, "BLOCK", block)
    for name in MASKED:
        native, plain = pair(name)
        key = mask_key(plain)
        message = f"pyattn: {key} must be the causal mask, 1 above the diagonal and else 0, {got}"
        with pytest.raises(RuntimeError, match=re.escape(message)):
            native.load_state_dict(plain.state_dict() | {key: mask}, strict=strict)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block", [1, 100, 2**20])
def test_causal_masks_of_other_dtypes_load(dtype, block, monkeypatch):
    monkeypatch.setattr(nn.mask_buffer, "BLOCK", block)
    native, plain = pair("MultiHeadAttention")
    native.load_state_dict(plain.state_dict() | {"mask": CAUSAL.to(dtype)})


def test_the_check_holds_a_block_at_a_time():
    """A mask of 64 MB is checked with less than half of that in extra memory."""
    native = nn.CausalAttention(2, 2, 4096, 0.0, persistent_mask=True)
    state = native.state_dict()
    assert 2**20 <= allocated(lambda: native.load_state_dict(state)) <= 2**25


class WithoutKey(reference.MultiHeadAttention):
    """Some editions of the book's class keep the mask out of the state dict."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_buffer("mask", self.mask, persistent=False)


def test_states_without_a_mask_go_both_ways():
    native, _ = pair("MultiHeadAttention")
    plain = WithoutKey(*ARGUMENTS["MultiHeadAttention"])
    assert native.persistent_mask
    native.load_state_dict(plain.state_dict(), strict=True)
    assert not native.persistent_mask, "states go back where they came from"
    assert_same_state(native, plain)
    plain.load_state_dict(native.state_dict(), strict=True)
    assert_same_state(copy.deepcopy(native), plain)
    _, usual = pair("MultiHeadAttention")
    native.load_state_dict(usual.state_dict(), strict=True)
    assert_same_state(native, usual)
    native.persistent_mask = False
    assert "mask" not in native.state_dict()
    plain.load_state_dict(native.state_dict(), strict=True)


@pytest.mark.parametrize("part", ["head.", "attention.W_query."])
def test_a_part_of_a_state_says_nothing_about_the_mask(part):
    """Adapters save only the parameters that they train."""
    model = torch.nn.ModuleDict({"attention": nn.CausalAttention(2, 2, 4, 0.0), "head": torch.nn.Linear(2, 2)})
    state = {key: value for key, value in model.state_dict().items() if key.startswith(part)}
    model.load_state_dict(state, strict=False)
    assert "attention.mask" in model.state_dict()


class Windowed:
    """A subclass with its own mask: each query sees itself and the two keys before it."""

    def __init__(self, *arguments: Any, persistent: bool = True) -> None:
        super().__init__(*arguments)
        self.register_buffer("mask", OTHER_MASKS["a window of 3"][0], persistent)


@pytest.mark.parametrize("name", ["CausalAttention", "MultiHeadAttention"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_subclass_with_a_mask_of_its_own(name, persistent):
    native, plain = (
        type("Subclass", (Windowed, class_of(name, home)), {})(*ARGUMENTS[name], persistent=persistent).double()
        for home in (nn, reference)
    )
    assert [key for key, _ in native.named_buffers()] == ["mask"]
    assert ("mask" in native.state_dict()) == persistent
    native.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(native.state_dict(), strict=True)
    assert_same_state(native, plain)
    x = sequences(2, 7)
    assert_same(native(x), plain(x))
    if persistent:
        for twin in (native, plain):
            twin.load_state_dict(plain.state_dict() | {"mask": OTHER_MASKS["zeros"][0]}, strict=True)
        assert not native.mask.any()
        assert_same(native(x), plain(x))


def test_an_assigned_mask_is_obeyed():
    native, plain = doubles("MultiHeadAttention")
    for module in (native, plain):
        module.mask = OTHER_MASKS["a window of 3"][0].double()
    x = sequences(2, 7)
    assert_same(native(x), plain(x))
    assert_same_state(native, plain)
    native.mask = None
    plain = pair("MultiHeadAttention")[1].double()
    native.load_state_dict(plain.state_dict(), strict=True)
    assert_same_state(native, plain)


def test_mask_can_be_read():
    native, plain = pair("MultiHeadAttention")
    assert torch.equal(native.mask, plain.mask)


@pytest.mark.parametrize("name", MASKED)
def test_no_mask_is_held(name):
    heads = () if name == "CausalAttention" else (1,)
    short, long = (class_of(name)(2, 2, length, 0.0, *heads) for length in (1024, 4096))
    for module in (short, long):
        module(torch.rand(1, 5, 2)).sum().backward()
        module.zero_grad()
        module.load_state_dict(module.state_dict())
        assert list(module.buffers()) == []
    # Pickles also hold addresses, of 14 or 15 digits; a mask of either length would take at least a million bytes.
    assert abs(len(pickle.dumps(long)) - len(pickle.dumps(short))) < 1000, "all that is held, whatever its name"


@every_module
def test_copies_compute_the_same(name):
    native, _ = pair(name)
    x = torch.rand(2, 7, D_IN)
    for twin in (copy.deepcopy(native), pickle.loads(pickle.dumps(native))):
        assert torch.equal(output(twin, x), output(native, x))


@every_module
def test_meta_modules_take_real_weights(name):
    with torch.device("meta"):
        native, plain = pair(name)
    assert_same_state(native, plain)
    _, plain = pair(name)
    native.load_state_dict(plain.state_dict(), assign=True)
    assert_same_state(native, plain)
