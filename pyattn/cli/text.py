"""Text as bytes: read, split, cut into windows."""

import codecs
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pyattn.cli import InputError

MAX_BYTES = 64 * 2**20
"""Most bytes read: hours of training on a CPU, and little memory beside the activations."""

VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and the bytes after them to validate on.

    Attributes:
        train, validation: uint8 (bytes,).
        source: where the text comes from, as a phrase.
    """

    train: Tensor
    validation: Tensor
    source: str

    def batches(self, batch: int, context: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Endless batches of random windows of the training bytes, int64 (batch, context + 1)."""
        windows = self.train.unfold(0, context + 1, 1)
        while True:
            yield windows[torch.randint(len(windows), (batch,), generator=generator)].long()

    def validation_windows(self, count: int, context: int) -> Tensor:
        """``count`` evenly spaced windows of the validation bytes, int64 (count, context + 1)."""
        windows = self.validation.unfold(0, context + 1, 1)
        return windows[torch.linspace(0, len(windows) - 1, count).long()].long()

    def unigram_loss(self) -> float:
        """Validation loss, in nats per byte, of a unigram model with the byte frequencies of the training bytes."""
        seen, expected = (torch.bincount(part, minlength=256).double() for part in (self.train, self.validation))
        chance = (seen + 1) / (seen + 1).sum()  # Laplace smoothing: no byte is impossible
        return float(-(expected / expected.sum()) @ chance.log())


def is_text(data: bytes) -> bool:
    """Whether ``data`` is UTF-8 without NUL; its last character may be cut off."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def read(data: Path | None, context: int) -> Text:
    """Read a file, the files of a folder, or by default the standard library's top-level modules.

    Files are shuffled in an order that does not depend on the seed, so training and validation see the same kinds of
    files and runs are comparable. Files that are not text, and bytes beyond ``MAX_BYTES``, are left out.

    Raises:
        InputError: no such file, no text in it, or less than one window of ``context`` + 1 bytes in a split.
    """
    if data is None:
        files, origin = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), "Python's standard library"
    elif data.is_dir():
        files, origin = sorted(path for path in data.rglob("[!.]*") if path.is_file()), str(data)
    elif data.is_file():
        files, origin = [data], str(data)
    else:
        raise InputError("data must be an existing file or folder", data)
    random.Random(0).shuffle(files)

    parts: list[bytes] = []
    room = MAX_BYTES
    for path in files:
        try:
            with path.open("rb") as file:
                part = file.read(room)
        except OSError as error:
            raise InputError("data must be readable", f"{path} ({error.strerror})") from error
        if part and is_text(part):
            parts.append(part)
            room -= len(part)
        if not room:
            break

    total = MAX_BYTES - room
    if not total:
        raise InputError("data must hold text (UTF-8)", f"none in {len(files)} files of {origin}")
    content = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
    split = total - int(total * VALIDATION_SHARE)
    train, validation = content[:split], content[split:]
    if len(validation) <= context:
        got = f"{len(validation)} of {total} bytes and context {context}"
        raise InputError(f"data's last {VALIDATION_SHARE:.0%}, for validation, must be longer than the context", got)
    return Text(train, validation, f"{len(parts)} files of {origin}")
