"""``pyattn show``: what a trained model's heads look at, as a picture.

Reads a checkpoint of ``pyattn train`` and draws, for a text and each head, the weight that each byte gives to the bytes
before it: queries down, keys across, darker for more. The weights of a row sum to 1; masked keys stay white.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyattn import attention_weights
from pyattn.cli import InputError, chart, checkpoint, output
from pyattn.cli.checks import check_text
from pyattn.cli.gpt import GPT, attend_pyattn
from pyattn.cli.options import Command

PICTURE = "weights.png"
TEXT = "def mean(numbers):\n    return sum("


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options."""
    parser = Command("show", __doc__)
    parser.add_argument("run", type=Path, help=f"folder that pyattn train wrote, or its {checkpoint.MODEL}")
    parser.add_argument(
        "--text", help="text to read, at most the model's context in bytes; default: the beginning of a function"
    )
    parser.add_argument("--layer", type=int, nargs="+", metavar="N", help="layers to show, from 0; default: all")
    parser.add_argument("--head", type=int, nargs="+", metavar="N", help="heads to show, from 0; default: all")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"PNG to write, replacing an earlier one; default: {PICTURE} in run"
    )
    return parser.parse_args(argv)


def chosen(name: str, numbers: Sequence[int] | None, size: int) -> list[int]:
    """The numbers of the layers or heads to show."""
    for number in numbers or ():
        if not 0 <= number < size:
            raise InputError(f"--{name} must lie between 0 and {size - 1}", number)
    return list(range(size)) if numbers is None else list(numbers)


@torch.no_grad()
def weights_of(model: GPT, ids: Tensor, layers: Sequence[int], heads: Sequence[int]) -> Tensor:
    """(layers, heads, S, S): the weights of the chosen layers and heads for ``ids`` (S,)."""
    found = []

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **options: Any) -> Tensor:
        found.append(attention_weights(q, k, heads=heads, **options)[0])
        return attend_pyattn(q, k, v, dropout_p, **options)

    model.attend = attend
    model(ids[None])
    return torch.stack([found[layer] for layer in layers])


def labels_of(text: bytes) -> list[str]:
    """One label per byte: the character, if one byte makes one; a stand-in for white space and other bytes."""
    stand_ins = {
        " ": "\N{OPEN BOX}",
        "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}",
        "\t": "\N{RIGHTWARDS ARROW TO BAR}",
    }
    signs = [chr(byte) if byte < 128 else f"{byte:02x}" for byte in text]
    return [stand_ins.get(sign, sign if sign.isprintable() else f"{ord(sign):02x}") for sign in signs]


def run(argv: Sequence[str]) -> int:
    """Read, compute and draw."""
    options = parse(argv)
    given = None if options.text is None else check_text("--text", options.text)
    model, path = checkpoint.of_run(options.run)
    out = options.out or path.parent / PICTURE
    text = TEXT.encode()[: model.config.context] if given is None else given
    if not 0 < len(text) <= model.config.context:
        raise InputError(f"--text must have 1 to {model.config.context} bytes, the model's context", len(text))
    layers = chosen("layer", options.layer, model.config.layers)
    heads = chosen("head", options.head, model.config.heads)
    output.check_file("--out", out)
    weights = weights_of(model, torch.tensor(list(text)), layers, heads)
    chart.draw_weights(weights, labels_of(text), layers, heads, out)
    print(f"{len(layers)} layers, {len(heads)} heads, {len(text)} bytes: {out}")
    return 0
