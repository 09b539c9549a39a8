"""Promise: each public name has one home, and no document or command needs a private one."""

import re
from pathlib import Path

import pytest

import pyattn
from pyattn import parts

ROOT = Path(__file__).parents[2]


def test_public_names_are_there_and_explained() -> None:
    assert pyattn.__all__ == sorted(pyattn.__all__) == dir(pyattn)
    for name in pyattn.__all__:
        assert getattr(pyattn, name).__doc__


def test_what_joins_parts_lives_in_parts_alone() -> None:
    for name in ("merge", "attention_backward"):
        assert name in parts.__all__
        assert not hasattr(pyattn, name)


@pytest.mark.parametrize("path", ["README.md", "pyattn/README.md", "pyattn/adapters/README.md", "pyattn/cli"])
def test_documents_and_commands_use_public_names(path: str) -> None:
    """``_C`` keeps what only commands need: the build's facts and the profiler."""
    found = ROOT / path
    text = "\n".join(file.read_text() for file in ([found] if found.is_file() else found.glob("*.py")))
    own = {"version", "compiler", "cuda_archs", "compiled_isas", "phases", "TaskProfile", "spin"}
    own |= {"start_profile", "stop_profile"}
    used = set(re.findall(r"\b_C\.(\w+)", text))
    assert used <= (own if path == "pyattn/cli" else set())
