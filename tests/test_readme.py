"""Promise: README's snippets run, one after the other, and do what it says."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pyattn import nn, reference


def snippets() -> list[str]:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_snippets_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # one of them saves a picture
    names: dict[str, Any] = {}
    for snippet in snippets():
        exec(snippet, names)
    assert names["lse"].shape == (2, 12, 1024)
    assert names["q"].grad.isfinite().all()
    torch.testing.assert_close(names["picture"].sum(-1), torch.ones(128))
    assert (tmp_path / "heatmap.png").stat().st_size > 0
    assert names["loss"] < math.log(256), "better than chance"


def test_gpt_trains_as_with_the_books_class() -> None:
    (snippet,) = (snippet for snippet in snippets() if "class GPTModel" in snippet)
    snippet = snippet.replace('"drop_rate": 0.1', '"drop_rate": 0.0')  # the two would draw different dropout masks
    states = []
    torch.set_default_dtype(torch.float64)
    try:
        for home in (nn, reference):
            torch.manual_seed(123)
            names: dict[str, Any] = {}
            exec(snippet.replace("pyattn.nn", home.__name__), names)
            assert type(names["model"].trf_blocks[0].att) is home.MultiHeadAttention
            states.append(names["model"].state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    native, plain = states
    assert list(native) == list(plain)
    torch.testing.assert_close(native, plain, rtol=0, atol=1e-6)
