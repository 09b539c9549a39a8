"""Limits of options and stored sizes, checked before the work begins; beyond one, a command prints one sentence."""

import os
from collections.abc import Callable
from functools import partial

import torch

LONGEST_INTEGER = 40
"""Digits that an error message shows; 2^64 has 20."""


class InputError(ValueError):
    """An input or a disk that stops a command; the command line shows its message without a traceback."""

    def __init__(self, rule: str, got: object) -> None:
        digits = len(str(got))
        long = isinstance(got, int) and digits > LONGEST_INTEGER
        super().__init__(f"pyattn: {rule}, got {f'an integer of {digits} digits' if long else got}")


INT64 = 2**63 - 1
FLOAT32 = torch.finfo(torch.float32)

MOST_THREADS = max(1024, os.cpu_count() or 1)
"""OpenMP ends the process if the system refuses it a thread, which systems do at some 1,000 to 30,000 threads; one
thread per processor is never refused."""


def check_integer(name: str, value: int, least: int, most: int = INT64, why: str = "int64 ends there") -> None:
    """Raise InputError unless ``value`` lies in [``least``, ``most``]; ``why`` is the reason for ``most``."""
    if value < least:
        raise InputError(f"{name} must be at least {least}", value)
    if value > most:
        raise InputError(f"{name} must be at most {most} ({why})", value)


def at_least(least: int) -> Callable[[str, int], None]:
    """:func:`check_integer` with this bound."""
    return partial(check_integer, least=least)


def check_positive(name: str, value: float, most: float = FLOAT32.max, zero: bool = True) -> None:
    """Raise InputError unless ``value`` is a positive float32 of at most ``most``, or 0 if ``zero``."""
    if not (FLOAT32.tiny <= value <= most or (zero and value == 0)):
        rule = f"{name} must be {'0 or ' if zero else ''}between {FLOAT32.tiny:.2g} and {most:.2g}"
        raise InputError(f"{rule}, a number of float32", value)


def check_share(name: str, value: float) -> None:
    """Raise InputError unless ``value`` is a probability below 1."""
    if not 0 <= value < 1:
        raise InputError(f"{name} must be at least 0 and below 1", value)


def check_window(name: str, window: tuple[int, int]) -> None:
    """Raise InputError unless each bound is -1 or a number of positions."""
    for number in window:
        check_integer(f"{name}: each of its two numbers", number, -1)


def check_threads(name: str, threads: int) -> None:
    """Raise InputError unless a process can start that many threads."""
    cores = f"this machine has {os.cpu_count()} processors, and more than {MOST_THREADS} threads may fail to start"
    check_integer(name, threads, 1, MOST_THREADS, cores)


def check_seed(name: str, seed: int) -> None:
    """Raise InputError unless torch.Generator takes ``seed``."""
    if not 0 <= seed < 2**64:
        raise InputError(f"{name} must lie in [0, 2^64)", seed)


def check_memory(what: str, needed: int, device: str) -> None:
    """Raise InputError if ``needed`` bytes, a lower bound for ``what``, exceed the whole memory of ``device``."""
    there = (
        torch.cuda.mem_get_info()[1] if device == "cuda" else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    if needed > there:
        rule = f"{what} must fit the memory of this {'GPU' if device == 'cuda' else 'machine'}, {there / 1e9:.3g} GB"
        raise InputError(rule, f"at least {needed / 1e9:.3g} GB")


def check_text(name: str, text: str) -> bytes:
    """The bytes of ``text``; InputError if it has lone surrogates, which is how bytes that are not UTF-8 arrive."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} must be text (UTF-8)", ascii(text[:40])) from error
