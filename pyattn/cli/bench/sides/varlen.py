"""Sequences of different lengths, packed: ``pyattn bench --only varlen``, beside padding and beside a loop.

Every side computes causal attention of the same tokens in its own layout, prepared before the clock starts. Padding
comes after a sequence, where a causal mask alone hides it; the masks people pass hide both, as a tensor. Sequences are
as long as real texts, in words: Python's own docstrings, and the sentences in them.
"""

import ast
import functools
import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import pyattn
from pyattn.cli.bench.sides.calls import Calls, Run, Side, both
from pyattn.cli.bench.sides.contenders import Attention, sdpa
from pyattn.cli.checks import InputError

SEQUENCES, HEADS, HEAD_DIM = 64, 8, 64
BASE = "torch sdpa padded"

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
"""White space after the end of a sentence, or an empty line."""

TEXTS = ("sentences", "docstrings")


@functools.cache
def documentation() -> tuple[str, ...]:
    """The docstrings of the standard library's top-level modules from a to c, which every Python has."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(ast.get_docstring(node) or "")
    return tuple(found)


def lengths_of(text: str, count: int) -> list[int]:
    """The word counts of ``count`` texts drawn with a fixed seed: sentences, or whole docstrings."""
    texts = [part for whole in documentation() for part in SENTENCE_END.split(whole)]
    words = [len(part.split()) for part in (texts if text == "sentences" else documentation())]
    words = [n for n in words if n]
    if len(words) < count:
        raise InputError(f"the standard library must have {count} {text}", len(words))
    return random.Random(0).sample(words, count)


def _one_by_one(lengths: list[int], attention: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
    """Attention in a loop over the sequences of packed tensors (total, H, D)."""
    sequences = zip(*(t.split(lengths) for t in qkv), strict=True)
    return torch.cat([attention(*(t.transpose(0, 1)[None] for t in each))[0].transpose(0, 1) for each in sequences])


def sides(lengths: Sequence[int], dtype: torch.dtype, device: str) -> dict[str, Side]:
    """The sides for sequences of these lengths, by name; BASE is the baseline.

    Tensors are (total, H, D) if packed, else (B, H, T, D), with sequence i in ``[i, :, : lengths[i]]``.
    """
    lengths = list(lengths)
    longest = max(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device)
    tokens = torch.randn(4, sum(lengths), HEADS, HEAD_DIM, dtype=dtype, device=device).unbind()
    real = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
    mask = real[:, None, None] & torch.ones(longest, longest, dtype=torch.bool, device=device).tril()

    def padded(t: Tensor) -> Tensor:
        return pad_sequence(list(t.split(lengths)), batch_first=True).transpose(1, 2).contiguous()

    *batch, dout = (padded(t) for t in tokens)
    *packed, dout_packed = tokens
    for leaf in (*batch, *packed):
        leaf.requires_grad_()

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return pyattn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest)

    in_batch: dict[str, Attention] = {
        BASE: partial(sdpa, attn_mask=mask),
        "torch sdpa padded, no mask": sdpa,
        "pyattn padded": pyattn.attention,
    }
    in_line: dict[str, Attention] = {
        "torch sdpa in a loop": partial(_one_by_one, lengths, sdpa),
        "pyattn in a loop": partial(_one_by_one, lengths, pyattn.attention),
    }
    return {
        "pyattn packed": Side(varlen, packed, dout_packed),
        **{name: Side(attend, batch, dout) for name, attend in in_batch.items()},
        **{name: Side(attend, packed, dout_packed) for name, attend in in_line.items()},
    }


def flops(lengths: Sequence[int]) -> int:
    """Floating-point operations of a forward, not counting padding."""
    return 2 * HEADS * HEAD_DIM * sum(n * (n + 1) for n in lengths)


def calls(run: Run, texts: tuple[str]) -> Calls:
    """Attention over sequences as long as real texts; operations on padding are not counted."""
    lengths = lengths_of(*texts, SEQUENCES)
    return both(sides(lengths, *run.place), flops(lengths))
