"""Lists of planted faults, and their places in a copy of the sources."""

import re
from pathlib import Path
from typing import NamedTuple


class BadFaultError(Exception):
    """The fault does not apply, or does not compile."""


class Fault(NamedTuple):
    """A fault: ``new`` instead of ``old``, which stands once in the file."""

    name: str
    file: str
    old: str
    new: str


def parse(text: str) -> list[Fault]:
    """The faults in the text: each file after #, then a line with the name, the old text and the new text of each.

    Raises BadFaultError for a line that is none of these.
    """
    faults, file, entry = [], "", r"^# (.+)$|^([^:\n]+): (.+)\s=> ?(.*)$"
    if rest := re.sub(entry, "", text, flags=re.MULTILINE).strip():
        raise BadFaultError(f"no fault is written like this: {rest.splitlines()[0]}")
    for header, name, old, new in re.findall(entry, text, re.MULTILINE):
        file = header or file
        if not header:
            faults.append(Fault(name, file, old, new))
    assert len({fault.name for fault in faults}) == len(faults), "two faults with one name: results go by names"
    return faults


def place(folder: Path, fault: Fault) -> range:
    """The range in its file that the fault's old text takes."""
    text = (folder / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise BadFaultError(f"does not apply: {text.count(fault.old)} times and not once in {fault.file}: {fault.old}")
    begin = text.index(fault.old)
    return range(begin, begin + len(fault.old))


def batches(folder: Path, faults: list[Fault]) -> list[list[Fault]]:
    """The faults in few lists, none of which has two that change the same text."""
    made: list[list[Fault]] = []
    taken: list[set[tuple[str, int]]] = []
    for fault in faults:
        text = {(fault.file, at) for at in place(folder, fault)}
        n = next((n for n, other in enumerate(taken) if not other & text), len(made))
        if n == len(made):
            made.append([]), taken.append(set())
        made[n].append(fault)
        taken[n] |= text
    return made
