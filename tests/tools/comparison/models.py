"""Whole training steps: forward, loss, backward and AdamW of three models, each with several attentions."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyattn.adapters import transformers as native
from pyattn.cli.gpt import ATTENTIONS, GPT, Config

RATE = 1e-4
NAMES = {"pyattn": "pyattn", "sdpa": "torch SDPA", "reference": "written out", "eager": "written out"}
"""Sides by the name of their attention."""

Step = Callable[[], float]


class Trainer:
    """A model and its optimizer; a call is one step, and returns the loss before it."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        self._loss = loss
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def __call__(self) -> float:
        """One step."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def gpt(attention: str, dtype: torch.dtype, compiled: bool) -> Trainer:
    """The GPT that ``pyattn train`` trains: GPT-2's blocks, as books write them."""
    config = Config(layers=2, heads=8, width=512, context=512, vocab=1024)
    model = GPT(config, ATTENTIONS[attention]).to(dtype)
    windows = torch.randint(config.vocab, (2, config.context + 1))
    loss = torch.compile(model.loss, dynamic=False) if compiled else model.loss
    return Trainer(model, lambda: loss(windows))


def vit(attention: str, dtype: torch.dtype, compiled: bool) -> Trainer:
    """transformers' ViT of 197 patches, two layers of half ViT-B's width."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384, num_hidden_layers=2, num_attention_heads=6, intermediate_size=1536, num_labels=100
    )
    config._attn_implementation = attention
    model = ViTForImageClassification(config).to(dtype)
    pictures, labels = torch.randn(4, 3, 224, 224, dtype=dtype), torch.randint(100, (4,))
    call = torch.compile(model, dynamic=False) if compiled else model
    return Trainer(model, lambda: nn.functional.cross_entropy(call(pixel_values=pictures).logits.float(), labels))


def llama(attention: str, dtype: torch.dtype, compiled: bool) -> Trainer:
    """transformers' Llama with 8 heads of 64 over 2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_cache=False,
    )
    config._attn_implementation = attention
    model = LlamaForCausalLM(config).to(dtype)
    ids = torch.randint(1024, (1, 1024))
    call = torch.compile(model, dynamic=False) if compiled else model
    return Trainer(model, lambda: call(input_ids=ids, labels=ids).loss)


MODELS: dict[str, tuple[Callable[[str, torch.dtype, bool], Trainer], str, str]] = {
    "GPT": (gpt, "reference", "2 layers, 8 heads of 64, batch 2 of 512 tokens"),
    "ViT": (vit, "eager", "2 layers, 6 heads of 64, batch 4 of 197 patches"),
    "Llama": (llama, "eager", "2 layers, 8 heads of 64 over 2, batch 1 of 1,024 tokens"),
}
"""By name: what makes it, the name of its attention written out, and its size."""


def steps(name: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """A trainer by side, all from the same weights and with the same batch; those with compiled models come last."""
    make, plain, _ = MODELS[name]
    native.register()
    found: dict[str, Callable[[], Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for compiled in (False, True):
            for attention in ("pyattn", "sdpa", plain):
                torch.manual_seed(0)
                side = NAMES[attention] + (", compiled model" if compiled else "")
                found[side] = make(attention, dtype, compiled)
    return found
