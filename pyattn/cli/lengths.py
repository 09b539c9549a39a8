"""How a model without learned positions reads on past the length that it was trained on."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from pyattn.cli.fit import autocast
from pyattn.cli.gpt import GPT
from pyattn.cli.text import Text

TIMES = (1, 2, 4, 8, 16)
"""Where the ranges of positions end, in training lengths."""

WINDOWS = 32
"""Texts to read: the second range of 256 bytes has 8,192 losses, whose mean has a standard deviation near 0.02 nats."""


@torch.no_grad()
def losses_by_position(model: GPT, windows: Tensor, dtype: torch.dtype) -> Tensor:
    """(S,): the mean loss at each position of ``windows`` (B, S + 1), one text at a time."""
    model.eval()
    total = torch.zeros(windows.shape[1] - 1, dtype=torch.float64)
    device = model.token.weight.device
    for window in windows.to(device):
        with autocast(device, dtype):
            logits = model(window[None, :-1])[0]
        total += nn.functional.cross_entropy(logits.float(), window[1:], reduction="none").double().cpu()
    return total / len(windows)


def losses_past(model: GPT, text: Text, dtype: torch.dtype) -> dict[int, float]:
    """The mean validation loss of each range of positions, by where it ends, as far as the text goes."""
    context = model.config.context
    ends = [context * times for times in TIMES if context * times < len(text.validation)]
    if not ends:
        return {}
    losses = losses_by_position(model, text.validation_windows(WINDOWS, ends[-1]), dtype)
    return {end: losses[begin:end].mean().item() for begin, end in pairwise([0, *ends])}


def show(model: GPT, text: Text, dtype: torch.dtype) -> None:
    """Print them, for a model that reads on."""
    if model.position is None:
        found = ", ".join(f"{end:,}: {loss:.4f}" for end, loss in losses_past(model, text, dtype).items())
        print(f"past the training length, validation loss of the bytes up to {found}")
