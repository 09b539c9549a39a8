"""Plant faults in copies of the sources, as many at a time as there are copies."""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from faults import BadFaultError, Fault, place
from native_copy import NativeCopy, Unit
from python_copy import PythonCopy
from source_copy import SourceCopy

import pyattn

AnyCopy = TypeVar("AnyCopy", bound=SourceCopy)


class Planter(Generic[AnyCopy]):
    """Plants faults of one kind.

    Attributes:
        root: the folder with the files that it changes.
        first: a copy, unchanged while no fault is planted.
    """

    root: str

    def __init__(self, copies: list[AnyCopy]) -> None:
        self.first = copies[0]
        if lost := sorted(test for test in self.first.tests() if not (self.first.folder / test).exists()):
            raise BadFaultError(f"tests must exist, got {', '.join(lost)}")
        self._copies: queue.Queue[AnyCopy] = queue.Queue()
        for copy in copies:
            self._copies.put(copy)

    @contextmanager
    def planted(self, faults: list[Fault]) -> Iterator[AnyCopy]:
        """A copy with the faults in it."""
        copy = self._copies.get()
        before = {fault.file: (copy.folder / fault.file).read_text() for fault in faults}
        try:
            for fault in faults:
                place(copy.folder, fault)
                path = copy.folder / fault.file
                path.write_text(path.read_text().replace(fault.old, fault.new))
            yield copy
        finally:
            for file, text in before.items():
                (copy.folder / file).write_text(text)
            self._copies.put(copy)

    def check(self, faults: list[Fault]) -> dict[str, str]:
        """The errors of faults that change different text: none if they compile together; else each half is checked."""
        try:
            with self.planted(faults) as copy:
                self.compile(copy, faults)
        except BadFaultError as error:
            if len(faults) == 1:
                return {faults[0].name: str(error)}
            half = len(faults) // 2
            return self.check(faults[:half]) | self.check(faults[half:])
        return {}

    def compile(self, copy: AnyCopy, faults: list[Fault]) -> None:
        """BadFaultError unless the copy with these faults compiles."""
        raise NotImplementedError

    def plant(self, fault: Fault) -> str | None:
        """The test that catches the fault."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Must come before :meth:`plant`."""

    def fails_without(self) -> str | None:
        """The test that fails without a fault, after :meth:`prepare`."""
        raise NotImplementedError


class NativePlanter(Planter[NativeCopy]):
    """Plants faults in the native side, for one backend after the other."""

    root = "csrc"

    def __init__(self, folders: list[Path], pool: ThreadPoolExecutor) -> None:
        self._all, self._pool = list(pool.map(NativeCopy, folders)), pool
        super().__init__(self._all)
        self._reads = list(pool.map(self.first.read, self.first.units))

    def _changed(self, copy: NativeCopy, faults: list[Fault]) -> list[Unit]:
        """The units that the faults may change."""
        files = {fault.file for fault in faults}
        return [unit for unit, read in zip(copy.units, self._reads, strict=True) if read & files]

    def compile(self, copy: NativeCopy, faults: list[Fault]) -> None:
        # The best instruction set and those of AVX-512 have all code; float16 has the same as bfloat16.
        alike = set(pyattn.isas()[1:]) - {"avx512", "avx512_bf16"}
        for unit in self._changed(copy, faults):
            if unit.backend not in alike and unit.object != "emulated_f16.o":
                copy.compile(unit, "-fsyntax-only")

    def prepare(self) -> None:
        """Builds all copies."""
        for copy in self._all:
            list(self._pool.map(lambda unit, copy=copy: copy.compile(unit, "-o", unit.object), copy.units))
            copy.link()

    def plant(self, fault: Fault) -> str | None:
        """The slowest backend comes last."""
        changed = False
        with self.planted([fault]) as copy:
            units = self._changed(copy, [fault])
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

    def fails_without(self) -> str | None:
        return self.first.caught_by("", "") or self.first.caught_by("", "emulated")


class PythonPlanter(Planter[PythonCopy]):
    """Plants faults in Python code."""

    root = "pyattn"

    def __init__(self, folders: list[Path], pool: ThreadPoolExecutor) -> None:
        super().__init__(list(pool.map(PythonCopy, folders)))

    def compile(self, copy: PythonCopy, faults: list[Fault]) -> None:
        for file in {fault.file for fault in faults}:
            try:
                compile((copy.folder / file).read_text(), file, "exec")
            except SyntaxError as error:
                raise BadFaultError(f"does not compile: {error}") from error

    def plant(self, fault: Fault) -> str | None:
        with self.planted([fault]) as copy:
            self.compile(copy, [fault])
            return copy.caught_by(fault.file)

    def fails_without(self) -> str | None:
        return self.first.caught_by("")
