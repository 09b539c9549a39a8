"""Plants faults in a copy of the native side, one at a time, and reports which of them the suite catches.

Not collected by pytest: run it by hand where PyTorch, pytest, pybind11, cmake and ninja are installed, after a change
of the kernels or of the tests::

    python tests/tools/planted_faults.py --check            # every fault applies and compiles: a minute or two
    python tests/tools/planted_faults.py --results FILE     # plants them all; run again, it continues where it stopped

A fault is planted for one instruction set after the other and in the emulated kernels, until a test fails. One that
does not apply or compile does not stop the others. The exit status is 1 if there is such a fault, or if fewer than
95 % are caught.
"""

import argparse
import json
import os
import queue
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from build_copy import BadFaultError, Copy, Unit

import pyattn

WANTED = 0.95


class Fault(NamedTuple):
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


def place(copy: Copy, fault: Fault) -> range:
    """The range in its file that the fault's old text takes."""
    text = (copy.folder / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise BadFaultError(f"does not apply: {text.count(fault.old)} times and not once in {fault.file}: {fault.old}")
    begin = text.index(fault.old)
    return range(begin, begin + len(fault.old))


def batches(copy: Copy, faults: list[Fault]) -> list[list[Fault]]:
    """The faults in few lists, none of which has two that change the same text."""
    made: list[list[Fault]] = []
    taken: list[set[tuple[str, int]]] = []
    for fault in faults:
        text = {(fault.file, at) for at in place(copy, fault)}
        n = next((n for n, other in enumerate(taken) if not other & text), len(made))
        if n == len(made):
            made.append([]), taken.append(set())
        made[n].append(fault)
        taken[n] |= text
    return made


class Planter:
    """Plants faults in copies, as many at a time as there are copies."""

    def __init__(self, copies: list[Copy], pool: ThreadPoolExecutor) -> None:
        self.copies: queue.Queue[Copy] = queue.Queue()
        for copy in copies:
            self.copies.put(copy)
        self.files = list(pool.map(copies[0].read, copies[0].units))

    @contextmanager
    def planted(self, faults: list[Fault]) -> Iterator[tuple[Copy, list[Unit]]]:
        """A copy with the faults in it, and the units that they may change."""
        copy = self.copies.get()
        before = {fault.file: (copy.folder / fault.file).read_text() for fault in faults}
        try:
            for fault in faults:
                place(copy, fault)
                path = copy.folder / fault.file
                path.write_text(path.read_text().replace(fault.old, fault.new))
            yield copy, [unit for unit, read in zip(copy.units, self.files, strict=True) if read & before.keys()]
        finally:
            for file, text in before.items():
                (copy.folder / file).write_text(text)
            self.copies.put(copy)

    def check(self, faults: list[Fault]) -> dict[str, str]:
        """The errors of faults that change different text: none if they compile together; else each half is checked."""
        try:
            with self.planted(faults) as (copy, units):
                for unit in units:
                    # The best instruction set and AVX-512 have all code; float16 has the same as bfloat16.
                    if unit.backend not in set(pyattn.isas()[1:]) - {"avx512"} and unit.object != "emulated_f16.o":
                        copy.compile(unit, "-fsyntax-only")
        except BadFaultError as error:
            if len(faults) == 1:
                return {faults[0].name: str(error)}
            half = len(faults) // 2
            return self.check(faults[:half]) | self.check(faults[half:])
        return {}

    def plant(self, fault: Fault) -> str | None:
        """The test that catches the fault, planted for one backend after the other, the slowest last."""
        changed = False
        with self.planted([fault]) as (copy, units):
            for backend in sorted(dict.fromkeys(unit.backend for unit in units), key=("scalar", "emulated").count):
                mine = [unit for unit in units if unit.backend == backend]
                before = {copy.build / unit.object: (copy.build / unit.object).read_bytes() for unit in mine}
                try:
                    for unit in mine:
                        copy.compile(unit, "-o", unit.object)
                    if all(path.read_bytes() == content for path, content in before.items()):
                        continue
                    changed = True
                    copy.link()
                    if by := copy.caught_by(fault.file, backend):
                        return f"{by} ({backend or 'module'})"
                finally:
                    for path, content in before.items():
                        path.write_bytes(content)
        if not changed:
            raise BadFaultError("changes no object")
        return None


def check(planter: Planter, pool: ThreadPoolExecutor, faults: list[Fault]) -> bool:
    """Whether every fault applies and compiles."""
    wrong: dict[str, str] = {}
    with planter.planted([]) as (copy, _):
        good = []
        for fault in faults:
            try:
                place(copy, fault)
                good.append(fault)
            except BadFaultError as error:
                wrong[fault.name] = str(error)
        together = batches(copy, good)
    for found in pool.map(planter.check, together):
        wrong |= found
    print(f"{len(faults) - len(wrong)} of {len(faults)} faults apply and compile, in {len(together)} copies")
    print(*(f"  {name}: {text}" for name, text in wrong.items()), sep="\n")
    return not wrong


def plant(planter: Planter, pool: ThreadPoolExecutor, faults: list[Fault], record: Path | None) -> bool:
    """Whether enough of the faults are caught."""
    results: dict[str, str | None] = {}
    if record and record.exists():
        results = dict(json.loads(line) for line in record.read_text().splitlines())

    def attempt(fault: Fault) -> bool:
        """Whether the fault applies and compiles."""
        if fault.name in results:
            return True
        begin, wrong = time.monotonic(), ""
        try:
            results[fault.name] = planter.plant(fault)
        except BadFaultError as error:
            wrong = f"BAD FAULT: {error}"
        print(
            f"{time.monotonic() - begin:4.0f} s  {fault.name}: {wrong or results[fault.name] or 'NOT CAUGHT'}",
            flush=True,
        )
        if record and not wrong:
            with record.open("a") as file:
                file.write(json.dumps([fault.name, results[fault.name]]) + "\n")
        return not wrong

    bad = [fault.name for fault, good in zip(faults, pool.map(attempt, faults), strict=True) if not good]
    missed = [fault.name for fault in faults if fault.name in results and results[fault.name] is None]
    done = len(faults) - len(bad)
    print(f"{done} of {len(faults)} faults apply and compile", *bad, sep="\n  ")
    print(f"{done - len(missed)} of {done} caught", *missed, sep="\n  ")
    return not bad and len(missed) <= (1 - WANTED) * len(faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="apply and compile the faults; run no test")
    parser.add_argument("--only", metavar="NAME", action="append", help="plant only this fault; may be repeated")
    parser.add_argument("--sample", type=int, nargs=2, metavar=("COUNT", "SEED"), help="plant so many, drawn by SEED")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="copies to work in at the same time; default: %(default)d"
    )
    parser.add_argument(
        "--results", type=Path, help="a file with a line of JSON for each planted fault; those are not planted again"
    )
    arguments = parser.parse_args()
    faults = parse(Path(__file__).with_name("planted_faults.txt").read_text())
    if arguments.only:
        if unknown := set(arguments.only) - {fault.name for fault in faults}:
            parser.error(f"no such fault: {', '.join(sorted(unknown))}")
        faults = [fault for fault in faults if fault.name in arguments.only]
    if arguments.sample:
        count, seed = arguments.sample
        faults = random.Random(seed).sample(faults, count)
    if arguments.list:
        print("\n".join(f"{fault.file}: {fault.name}" for fault in faults))
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies = list(pool.map(Copy, (Path(folder, str(n)) for n in range(arguments.jobs))))
        planter = Planter(copies, pool)
        if arguments.check:
            sys.exit(not check(planter, pool, faults))
        for copy in copies:
            list(pool.map(lambda unit, copy=copy: copy.compile(unit, "-o", unit.object), copy.units))
            copy.link()
        begun = arguments.results and arguments.results.exists()
        if not begun and (by := copies[0].caught_by("", "") or copies[0].caught_by("", "emulated")):
            sys.exit(f"without a fault the suite fails too: {by}")
        sys.exit(not plant(planter, pool, faults, arguments.results))


if __name__ == "__main__":
    main()
