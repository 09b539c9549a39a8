"""Promise: every example in a docstring runs and gives what it shows."""

import doctest
import importlib
import re
from pathlib import Path

import torch

import pyattn

ROOT = Path(__file__).parents[1]


def test_examples() -> None:
    """A class is found in the package that gives it its public name, so packages are searched too."""
    modules, written = set(), 0
    for path in (ROOT / "pyattn").rglob("*.py"):
        examples = re.findall(r"^ *>>> (?!.*doctest: \+SKIP)", path.read_text(), re.MULTILINE)
        if examples:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            modules |= {name, name.rpartition(".")[0]}
            written += len(examples)
    ran = 0
    for name in sorted(modules):
        result = doctest.testmod(importlib.import_module(name), extraglobs={"pyattn": pyattn, "torch": torch})
        assert not result.failed, name
        ran += result.attempted - getattr(result, "skipped", 0)  # Python 3.13 counts what it skips
    assert ran == written
