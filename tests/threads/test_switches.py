"""Promise: switches of adapters, and what adapters remember, serve eight Python threads at once.

Races are made to happen where they can: a step between a check and what follows from it is slowed down.
"""

import importlib
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import assert_equal
from support.threads import THREADS, at_once, case, slow
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pyattn.adapters import flash_attn, sdpa, torch_varlen
from pyattn.adapters.flash_attn.rotary_embedding import RotaryEmbedding
from pyattn.adapters.flex import create_block_mask, flex_attention
from pyattn.adapters.flex.compiled import masks as flex_masks
from pyattn.adapters.flex.compiled import programs


def test_sdpa_is_switched() -> None:
    """Every call is torch's or ours, whole, and the switch is off in the end."""
    q, k, v, _ = case(4)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)

    def work(number: int) -> None:
        for _ in range(10):
            if number % 2:
                with sdpa.enabled():
                    assert sdpa.is_enabled()
                    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=True), expected)
            else:
                torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=True), expected)

    at_once(work)
    assert not sdpa.is_enabled()


def test_the_alias() -> None:
    """Blocks overlap: the first that ends leaves the alias to the others, the last one switches it off."""

    def work(number: int) -> None:
        for _ in range(5):
            with flash_attn.alias():
                time.sleep(0.001 * number)
                assert flash_attn.enabled()
                module = importlib.import_module("flash_attn_interface")
                assert module.flash_attn_func.__module__ == "pyattn.adapters.flash_attn.hopper.dense"

    at_once(work)
    assert not flash_attn.enabled()
    assert not [name for name in sys.modules if name.startswith("flash_attn")]


def test_torchs_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is activated once: two threads that find it inactive do not both activate it."""
    activated, state = [], {"name": None}

    def activate(name: str) -> None:
        time.sleep(0.02)
        activated.append(name)
        state["name"] = name

    torchs = SimpleNamespace(
        register_flash_attention_impl=lambda *_, **__: None,
        current_flash_attention_impl=lambda: state["name"],
        activate_flash_attention_impl=activate,
    )
    monkeypatch.setattr(torch_varlen, "torch_attention", torchs)
    at_once(lambda _: torch_varlen.activate())
    assert activated == [torch_varlen.NAME]


def test_names_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that share their names: each program has a separate name, or a graph runs another's."""
    monkeypatch.setattr(programs, "PROGRAMS", {})
    monkeypatch.setattr(programs, "_names", {})
    monkeypatch.setattr(programs, "Program", slow(lambda calls, *_: calls))

    def function_of(number: int) -> Callable[[], int]:
        def same_name() -> int:
            return number

        return same_name

    functions = [function_of(number) for number in range(THREADS)]
    names = at_once(lambda number: programs.name_of(((functions[number], (), {}),), "%0"))
    assert len(set(names)) == THREADS
    for number, name in enumerate(names):
        assert programs.PROGRAMS[name][0][0] is functions[number]


def test_numbers_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph refers to block masks by number, which no two share."""

    class Numbers:
        """Counts as itertools.count does without the GIL: it reads, and then writes."""

        last = 0

        def __next__(self) -> int:
            now = self.last
            time.sleep(0.005)
            self.last = now + 1
            return now

    monkeypatch.setattr(flex_masks, "_numbers", Numbers())
    monkeypatch.setattr(flex_masks, "NUMBERED", type(flex_masks.NUMBERED)())

    def work(number: int) -> Any:
        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q * 3 + k) % (2 + number) == 0

        return create_block_mask(mask_mod, None, None, 32, 32, device="cpu")

    found = at_once(work)
    assert len({mask.numbered.number for mask in found}) == THREADS
    assert all(flex_masks.NUMBERED[mask.numbered.number] is mask for mask in found)


def test_one_mask_in_all_threads() -> None:
    """A mask that is remembered, and evaluated again when its tensor has changed: each thread sees a whole one."""
    limit = torch.tensor([5])
    mask = create_block_mask(lambda b, h, q, k: (q * k) % limit[0] != 1, None, None, 64, 64, device="cpu")
    q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
    expected = []
    for value in (5, 7):
        limit[0] = value
        expected.append(flex_attention(q, k, v, None, mask))

    def work(number: int) -> None:
        for turn in range(10):
            if number == 0:
                limit[0] = (5, 7)[turn % 2]
            found = flex_attention(q, k, v, None, mask)
            assert found.shape == expected[0].shape

    at_once(work)
    for value, one in zip((5, 7), expected, strict=True):
        limit[0] = value
        for found in at_once(lambda _: flex_attention(q, k, v, None, mask)):
            assert_equal([found], [one])


def test_one_rotary_embedding_in_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables grow while others read them, in two dtypes."""
    module, fresh = RotaryEmbedding(8), [RotaryEmbedding(8) for _ in range(THREADS)]
    monkeypatch.setattr(RotaryEmbedding, "_update_cos_sin_cache", slow(RotaryEmbedding._update_cos_sin_cache))

    def turned(rotary: RotaryEmbedding, number: int) -> Tensor:
        torch.manual_seed(number)
        x = torch.ones(1, 4 + 5 * number, 3, 2, 8, dtype=(torch.float32, torch.float64)[number % 2])
        return rotary(x)

    expected = [turned(fresh[number], number) for number in range(THREADS)]
    for found, one in zip(at_once(lambda number: turned(module, number)), expected, strict=True):
        assert_equal([found], [one])
