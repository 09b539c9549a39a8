"""How a model without learned positions reads on past the length that it was trained on."""

import torch
from torch import nn

from pyattn.cli.fit import autocast
from pyattn.cli.gpt import GPT
from pyattn.cli.text import Text

TIMES = (1, 2, 4, 8, 16)
"""How long texts are, in training lengths."""

TEXTS = 32
"""Texts to read: the mean of 32 times 128 losses, each with a deviation near 2 nats, has one near 0.03."""


@torch.no_grad()
def losses_past(model: GPT, text: Text, dtype: torch.dtype) -> dict[int, float]:
    """The mean loss of the same validation bytes, by the length of the text that they end, as far as there is text.

    The bytes are the last half training length of each text: the shortest one, too, has as much to read before them.
    """
    context, device = model.config.context, model.token.weight.device
    lengths = [context * times for times in TIMES if context * times < len(text.validation)]
    if not lengths:
        return {}
    model.eval()
    texts = text.validation_windows(TEXTS, lengths[-1]).to(device)
    judged, losses = -(-context // 2), dict.fromkeys(lengths, 0.0)
    for length in lengths:
        for ids in texts[:, -length - 1 :]:
            with autocast(device, dtype):
                logits = model(ids[None, :-1])[0, -judged:]
            losses[length] += nn.functional.cross_entropy(logits.float(), ids[-judged:]).item() / TEXTS
    return losses


def show(model: GPT, text: Text, dtype: torch.dtype) -> None:
    """Print them, for a model that reads on."""
    if model.position is None:
        found = ", ".join(f"{length:,}: {loss:.4f}" for length, loss in losses_past(model, text, dtype).items())
        print(f"past the training length, validation loss of the same bytes at the end of {found}")
