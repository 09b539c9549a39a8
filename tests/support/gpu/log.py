"""One size-limited file with the output of all processes."""

import io
import subprocess
import threading
from pathlib import Path
from typing import cast

LARGEST = 8 * 2**20
"""Most bytes of the file."""

SHARE = 2**20
"""Most bytes that one process may fill, so a noisy one leaves room for others."""

LAST = 4096
"""Bytes in which to look for a process's last line."""


class Log:
    """A file that accepts output while there is room."""

    def __init__(self, path: Path, largest: int = LARGEST, share: int = SHARE) -> None:
        self.share = share
        self._path, self._lock = path, threading.Lock()
        self._room = largest - (path.stat().st_size if path.exists() else 0)

    def append(self, text: bytes) -> None:
        """Appends ``text`` and drops what does not fit."""
        with self._lock, self._path.open("ab") as file:
            self._room -= file.write(text[: max(0, self._room)])


class Copy(threading.Thread):
    """Copies a process's output to the log until it ends."""

    def __init__(self, process: subprocess.Popen[bytes], log: Log) -> None:
        super().__init__(daemon=True)
        self._output, self._log, self._end = cast(io.BufferedReader, process.stdout), log, b""
        self.start()

    def run(self) -> None:
        room = self._log.share
        with self._output as output:
            while text := output.read1():
                self._log.append(text[:room])
                room -= len(text[:room])
                self._end = (self._end + text)[-LAST:]

    def last_line(self) -> str:
        """The last line, after waiting for the output's end; a descendant of the process may keep it open."""
        self.join(timeout=10)
        return self._end.decode(errors="replace").strip().rpartition("\n")[2]
