"""Promise: the snippets of the front page and of each room's page run in their order, and do what the pages say."""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pyattn import attention_varlen, nn, reference
from pyattn.adapters import scratch

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "pyattn/README.md",
    "pyattn/nn/README.md",
    "pyattn/adapters/README.md",
    "pyattn/adapters/scratch/README.md",
    "pyattn/distributed/README.md",
    "pyattn/selection/README.md",
)
OTHER_PAGES = (
    "pyattn/cli/README.md",
    "pyattn/cli/profile/README.md",
    "csrc/README.md",
    "csrc/cpu/README.md",
    "csrc/cuda/README.md",
    ".github/CONTRIBUTING.md",
)


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def names_of(page: str, older: dict[str, str] | None = None) -> dict[str, Any]:
    """Runs the page's snippets, in ``older``'s spelling where one is given, and returns the names that they define."""
    names: dict[str, Any] = {}
    for snippet in snippets(page):
        for new, old in (older or {}).items():
            snippet = snippet.replace(new, old)
        exec(snippet, names)
    return names


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snippets write pictures and models."""
    monkeypatch.chdir(tmp_path)


def test_front_page() -> None:
    names = names_of("README.md")
    assert names["lse"].shape == (2, 12, 1024)
    assert names["q"].grad.isfinite().all()


def check_tree_decoding(names: dict[str, Any]) -> None:
    """The tree's tokens are those of one token at a time, in fewer calls."""
    decoded, used = names["decoded"].tolist(), int(names["cache"].lengths)
    keys = names["cache"].k.clone().flatten(0, 1)[:used]
    assert used == 12 + len(decoded) - 1
    names["cache"].reset()
    with torch.no_grad():
        token = names["read"](names["prompt"][0], torch.arange(12))[-1:]
        for at, expected in enumerate(decoded):
            assert token.item() == expected
            token = names["read"](token, torch.tensor([12 + at]))
    torch.testing.assert_close(keys, names["cache"].k.flatten(0, 1)[:used])
    assert names["calls"] < 0.8 * len(decoded)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own, in its ONNX exporter
def test_tasks_and_recipes() -> None:
    names = names_of("pyattn/README.md")
    assert names["q"].grad.isfinite().all()
    assert names["losses"][-1] < names["losses"][0] / 2
    assert names["sentences"].shape == (3, 64)
    assert len(names["written"]) == 9
    assert names["scores"].isfinite().all()
    check_tree_decoding(names)
    torch.testing.assert_close(names["picture"].sum(-1), torch.ones(128))
    assert Path("heatmap.png").stat().st_size > 0


def test_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    # These need transformers, which not every machine has.
    from support.adapters.models import CACHE

    from pyattn.adapters.transformers import masks

    monkeypatch.setattr(masks, "DENSE", Counter())  # what other tests of this process left
    names = names_of("pyattn/adapters/README.md", {"cache=kv_cache": f"{CACHE}=kv_cache"})
    assert names["losses"][-1] < names["losses"][0]
    assert names["q"].grad.isfinite().all()


def test_your_code(capsys: pytest.CaptureFixture[str]) -> None:
    scratch.reset_counts()
    names = names_of("pyattn/adapters/scratch/README.md")
    assert not any(module._forward_hooks for module in names["model"].modules())
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["Counts(taken=2, left={})", *["(2, 4, 256, 16) x (2, 4, 256, 16), float32: attention"] * 2]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, as torchrun --nproc-per-node 1 would start it."""
    settings = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    try:
        names = names_of("pyattn/distributed/README.md")
        assert names["whole"].shape == (1, 8, 1000, 64)
        assert all(part.grad.isfinite().all() for part in names["parts"])
        assert names["project"].weight.grad.isfinite().all()
        assert names["x"].shape == (1, 1000, 64)
        begins, packed = names["cu_seqlens"], names["packed"]
        torch.testing.assert_close(names["tokens"], attention_varlen(*packed, begins, begins, 500, 500))
        assert names["state"].keys() == dict(names["model"].named_parameters()).keys() | {"0.mask", "1.mask"}
        assert names["rows"].placements == names["q"].placements
    finally:
        torch.distributed.destroy_process_group()


def test_selection() -> None:
    """The shares of the losses that the page prints are those of any machine."""
    names = names_of("pyattn/selection/README.md")
    assert names["step"].shape == (2, 1, 1, 64)
    assert names["blocks"].shape == (2, 2, 1024, 4)
    curves = {stage: torch.tensor(losses) for stage, losses in names["curves"].items()}
    text = {stage: losses[-20:, 0].mean() for stage, losses in curves.items()}
    assert text["dense"] < 0.6 * curves["dense"][0, 0]
    assert text["sparse"] < text["dense"] + 0.2
    assert curves["warm-up"][-20:, 1].mean() < 0.4 * curves["warm-up"][0, 1]
    assert curves["sparse"][-20:, 1].mean() < curves["warm-up"][-20:, 1].mean()


def test_modules() -> None:
    assert names_of("pyattn/nn/README.md")["loss"] < math.log(256), "better than chance"


def test_gpt_trains_as_with_the_books_class() -> None:
    snippet = next(text for text in snippets("pyattn/nn/README.md") if "GPTModel" in text)
    snippet = snippet.replace('"drop_rate": 0.1', '"drop_rate": 0.0')  # the two would drop different weights
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


@pytest.mark.skipif(not (ROOT / ".github").exists(), reason="the sdist has neither .github nor the records")
@pytest.mark.parametrize("page", PAGES + OTHER_PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Files and headings that a page links to are there."""
    home = (ROOT / page).parent
    for file, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text(encoding="utf-8")):
        target = home / file if file else ROOT / page
        assert target.exists(), file
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert heading in slugs, (heading, slugs)


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 170
