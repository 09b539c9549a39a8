"""Promise: every architecture that asks transformers for an attention function computes what eager attention does.

All of them are small models in float32 with padding on the left: logits, gradients of all parameters, and greedy
generation with a cache.
"""

from typing import Any

import pytest
import torch
from support.adapters import tiny
from support.adapters.models import IDS, PADDING
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pyattn.adapters import transformers as adapter

ARCHITECTURES = tiny.architectures()
IN_FLOAT64 = {"dory", "mobilebert"}
"""Their roundings grow: sdpa differs from eager attention in float32 as much."""

UNPADDED = {"minimax_m3_vl", "minimax_m3_vl_text"}
"""A token may select padding alone. Eager attention then averages every key, later ones as well; ours has out 0."""

REFUSED = {"git": "its own attention, got 'pyattn' for GitForCausalLM"}
ROUNDINGS = 2**-13
"""2^-24, amplified by 2^11 in four layers. A wrong mask changes results by some 2^-3."""


def results(model: Any, kind: str, generate: bool, mask: Tensor) -> dict[str, Tensor]:
    """Logits, gradients and the logits of generated tokens."""
    decoded = {"decoder_input_ids": IDS[:, :7]} if kind == "Seq2SeqLM" else {}
    model.zero_grad()
    logits = model(input_ids=IDS, attention_mask=mask, **decoded).logits
    logits = logits[mask.bool()] if logits.shape[1] == IDS.shape[1] else logits
    dout = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    (logits * dout).sum().backward()
    found = {"logits": logits.detach()}
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.numel()}
    if generate:
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        generated = model.generate(IDS, attention_mask=mask, **options)
        found["generated"] = torch.stack(generated.logits)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_architecture(model_type, monkeypatch, request):
    if model_type in tiny.UNBUILT:
        pytest.skip(tiny.UNBUILT[model_type])
    kind = ARCHITECTURES[model_type]
    adapter.register()
    model = tiny.model(model_type, kind)
    if model_type in IN_FLOAT64:
        request.getfixturevalue("softmax_in_its_own_dtype")
        model = model.double()
    if model_type in REFUSED:
        with pytest.raises(NotImplementedError, match=REFUSED[model_type]):
            model.set_attn_implementation("pyattn")
        return
    calls: list[str] = []

    def counted(module, *arguments, **named):
        calls.append(type(module).__name__)
        return adapter.attention_function(module, *arguments, **named)

    monkeypatch.setitem(AttentionInterface._global_mapping, "pyattn", counted)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "pyattn", counted)
    mask = PADDING["none" if model_type in UNPADDED else "left"]
    generate = kind != "MaskedLM"
    truth = results(model, kind, generate, mask)
    model.set_attn_implementation("pyattn")
    found = results(model, kind, generate, mask)
    assert calls
    assert found.keys() == truth.keys()
    largest = max(x.abs().max() for name, x in truth.items() if name not in ("logits", "generated"))
    for name, expected in truth.items():
        scale = expected.abs().max() if name in ("logits", "generated") else largest
        assert scale.isfinite()
        assert (found[name] - expected).abs().max() <= ROUNDINGS * scale, name
