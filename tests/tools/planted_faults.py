"""Plants faults in copies of the native side and of Python code, one at a time; reports which the suite catches.

Not collected by pytest: run it by hand where PyTorch, pytest, pybind11, cmake and ninja are installed, after a change
of the kernels, of the Python code that the lists quote or of the tests::

    python tests/tools/planted_faults.py --check            # every fault applies and compiles: a minute or two
    python tests/tools/planted_faults.py --results FILE     # plants them all; run again, it continues where it stopped

planted_faults.txt has those of the native side, planted for one instruction set after the other and in the emulated
kernels, until a test fails; planted_faults_of_ranks.txt those of pyattn.distributed and planted_faults_of_adapters.txt
those of the adapters and of merging, for which the tests of their folders run; planted_faults_of_threads.txt those of
locks. One that does not apply or compile does not stop the others. The exit status is 1 if there is such a fault, or if
fewer than 95 % of either kind are caught.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from faults import BadFaultError, Fault, batches, parse, place
from planters import NativePlanter, Planter, PythonPlanter

LISTS = tuple(f"planted_faults{of}.txt" for of in ("", "_of_ranks", "_of_adapters", "_of_threads"))
WANTED = 0.95


def check(planter: Planter[Any], pool: ThreadPoolExecutor, faults: list[Fault]) -> bool:
    """Whether every fault applies and compiles."""
    folder, good, wrong = planter.first.folder, list[Fault](), dict[str, str]()
    for fault in faults:
        try:
            place(folder, fault)
            good.append(fault)
        except BadFaultError as error:
            wrong[fault.name] = str(error)
    together = batches(folder, good)
    for found in pool.map(planter.check, together):
        wrong |= found
    print(f"{len(faults) - len(wrong)} of {len(faults)} faults apply and compile, in {len(together)} copies")
    print(*(f"  {name}: {text}" for name, text in wrong.items()), sep="\n")
    return not wrong


def plant(planter: Planter[Any], pool: ThreadPoolExecutor, faults: list[Fault], record: Path | None) -> bool:
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
    parser.add_argument("--under", metavar="FOLDER", default="", help="plant only faults in files of this folder")
    parser.add_argument("--sample", type=int, nargs=2, metavar=("COUNT", "SEED"), help="plant so many, drawn by SEED")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="copies to work in at the same time; default: %(default)d"
    )
    parser.add_argument(
        "--results", type=Path, help="a file with a line of JSON for each planted fault; those are not planted again"
    )
    arguments = parser.parse_args()
    faults = parse("\n".join(Path(__file__).with_name(name).read_text() for name in LISTS))
    faults = [fault for fault in faults if fault.file.startswith(arguments.under)]
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
    good, begun = True, arguments.results and arguments.results.exists()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for kind in (NativePlanter, PythonPlanter):
            mine = [fault for fault in faults if fault.file.startswith(f"{kind.root}/")]
            if not mine:
                continue
            planter = kind([Path(folder, kind.root, str(n)) for n in range(arguments.jobs)], pool)
            if arguments.check:
                good &= check(planter, pool, mine)
                continue
            planter.prepare()
            if not begun and (by := planter.fails_without()):
                sys.exit(f"without a fault the suite fails too: {by}")
            good &= plant(planter, pool, mine, arguments.results)
    sys.exit(not good)


if __name__ == "__main__":
    main()
