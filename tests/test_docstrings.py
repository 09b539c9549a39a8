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
    found = {}  # by docstring, because Python 3.13 finds some classes in two packages
    for name in sorted(modules):
        tests = doctest.DocTestFinder().find(
            importlib.import_module(name), extraglobs={"pyattn": pyattn, "torch": torch}
        )
        found |= {test.docstring: test for test in tests}
    results = [doctest.DocTestRunner().run(test) for test in found.values()]
    assert not any(result.failed for result in results)
    assert sum(result.attempted for result in results) == written
