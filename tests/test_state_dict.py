"""Promise: state dicts go both ways between native and plain modules, and no native module holds a T x T tensor."""

import copy
import io
import pickle

import pytest
import torch
from module_cases import ARGUMENTS, CONTEXT_LENGTH, D_IN, every_module, output, pair

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
    fresh_native, fresh_plain = getattr(nn, name)(*ARGUMENTS[name]), getattr(reference, name)(*ARGUMENTS[name])
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


@pytest.mark.parametrize("name", MASKED)
def test_loading_checks_the_mask(name):
    native, plain = pair(name)
    key = next(key for key in plain.state_dict() if key.endswith("mask"))
    shape = rf"pyattn: {key} must have shape \({CONTEXT_LENGTH}, {CONTEXT_LENGTH}\), got \(3, 4\)"
    with pytest.raises(RuntimeError, match=shape):
        native.load_state_dict(plain.state_dict() | {key: torch.ones(3, 4)})
    without = {k: v for k, v in plain.state_dict().items() if k != key}
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{key}"'):
        native.load_state_dict(without)
    assert native.load_state_dict(without, strict=False).missing_keys == [key]
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "masks"'):
        native.load_state_dict(plain.state_dict() | {"masks": torch.ones(1)})


def test_mask_can_be_read():
    native, plain = pair("MultiHeadAttention")
    assert torch.equal(native.mask, plain.mask)


@pytest.mark.parametrize("name", MASKED)
def test_no_mask_is_held(name):
    heads = () if name == "CausalAttention" else (1,)
    short, long = (getattr(nn, name)(2, 2, length, 0.0, *heads) for length in (1024, 4096))
    assert list(long.buffers()) == []
    long(torch.rand(1, 5, 2)).sum().backward()
    long.zero_grad()
    long.load_state_dict(long.state_dict())
    assert len(pickle.dumps(long)) == len(pickle.dumps(short)), "all that is held, whatever its name"


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
