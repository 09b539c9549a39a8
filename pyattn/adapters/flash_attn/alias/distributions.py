"""Distributions that importlib.metadata finds while the alias is on: libraries ask it for flash-attn."""

import os
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any

VERSION = "2.8.4+pyattn"
"""The flash-attn version that the functions of flash_attn match; code compares it with the version it needs."""

VERSION_3 = "3.0.0+pyattn"
"""The version of flash_attn_3."""

VERSION_4 = "4.0.0+pyattn"
"""The version of flash_attn.cute."""

PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "flash-attn": (VERSION, ("flash_attn",)),
    "flash-attn-3": (VERSION_3, ("flash_attn_interface", "flash_attn_3")),
}
"""Each distribution's version and the packages that it holds, as in flash-attention's own."""


class AliasDistribution(Distribution):
    """A distribution without files: its metadata and the names of its packages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._version, self._packages = PACKAGES[name]

    def read_text(self, filename: str) -> str | None:
        """METADATA and top_level.txt; None for any other file."""
        if filename in ("METADATA", "PKG-INFO"):
            return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {self._version}\n"
        return "\n".join(self._packages) + "\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """The place beside the alias where such a file would be."""
        return Path(__file__).parent / path


def found(context: DistributionFinder.Context) -> Iterator[Distribution]:
    """The distributions of the alias that have the name that is looked for, or all."""
    wanted = context.name
    for name in PACKAGES:
        if wanted is None or re.sub(r"[-_.]+", "-", wanted).lower() == name:
            yield AliasDistribution(name)
