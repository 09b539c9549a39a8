"""Lengths of real texts, in words: Python's own documentation strings, and the sentences in them."""

import ast
import functools
import random
import re
import sysconfig
from pathlib import Path

from pyattn.cli import InputError

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
"""White space behind a full stop, or an empty line."""

TEXTS = ("sentences", "docstrings")


@functools.cache
def documentation() -> tuple[str, ...]:
    """The documentation strings of the standard library's top-level modules, which every Python has."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(ast.get_docstring(node) or "")
    return tuple(found)


def lengths(text: str, count: int) -> list[int]:
    """The words of ``count`` texts drawn at random, the same ones each time: of sentences, or of whole docstrings."""
    texts = [part for whole in documentation() for part in SENTENCE_END.split(whole)]
    words = [len(part.split()) for part in (texts if text == "sentences" else documentation())]
    words = [n for n in words if n]
    if len(words) < count:
        raise InputError(f"the standard library must have {count} {text}", len(words))
    return random.Random(0).sample(words, count)
