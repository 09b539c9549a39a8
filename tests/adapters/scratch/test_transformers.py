"""Small models of transformers, converted: logits and gradients equal the plain model's."""

import copy

import pytest
import torch
import transformers

from pyattn.adapters import scratch

VOCABULARY, T = 64, 12
IDS = torch.randint(3, VOCABULARY, (2, T), generator=torch.Generator().manual_seed(0))
PADDED = torch.arange(T).ge(torch.tensor([[5], [0]])).long()
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HF = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "GPTNeo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4, "max_position_embeddings": 64}
    | {"attention_types": [[["global", "local"], 1]], "resid_dropout": 0.0, "embed_dropout": 0.0},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    | {"new_decoder_architecture": False, "multi_query": True},
    "XLNet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "Swin": {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4},
    "GPTJ": HF | {"rotary_dim": 4},
    "Llama": LLAMA | {"num_key_value_heads": 2},
    "GptOss": LLAMA
    | {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 4},
}
COUNTS = {"GptOss": (4, {"slice": 8}), "XLNet": (4, {"slice": 4}), "T5": (12, {})}
"""GPT-OSS has experts; XLNet's second product is shifted by views; T5 has three attentions a pair of layers."""


def made(name):
    """A model without dropout, with weights large enough for attention to matter."""
    config = getattr(transformers, f"{name}Config")(**MODELS[name] | ({} if name == "Swin" else TEXT))
    auto = {"Swin": transformers.AutoModel, "T5": transformers.AutoModelForSeq2SeqLM}
    torch.manual_seed(0)
    model = auto.get(name, transformers.AutoModelForCausalLM).from_config(config, attn_implementation="eager")
    if name == "GptOss":
        model.set_experts_implementation("eager")  # the others don't support float64
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model.eval()


def step(model, name, mask=None):
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    if name == "Swin":
        generator = torch.Generator().manual_seed(1)
        out = model(torch.randn(2, 3, 32, 32, generator=generator, dtype=dtype)).last_hidden_state
    elif name == "T5":
        out = model(input_ids=IDS, decoder_input_ids=IDS, attention_mask=mask).logits
    else:
        out = model(input_ids=IDS, attention_mask=mask).logits
    out = out if mask is None else out[mask.bool()]
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return out.detach() + 0, gradients


def errors(found, truth):
    """The largest differences of outputs and gradients, relative to the largest of each."""
    largest = max(float(g.abs().max()) for g in truth[1])
    out = float((found[0] - truth[0]).abs().max() / truth[0].abs().max())
    return out, max(float((a - b).abs().max()) for a, b in zip(found[1], truth[1], strict=True)) / largest


FLOAT32 = ("GPTNeo", "Bloom", "GPTJ", "Llama", "GptOss", "T5", "Swin")
"""Models that compute scores, rotations or softmaxes in float32: one rounding, amplified by layers."""


@pytest.mark.parametrize("name", MODELS)
def test_steps(name):
    plain = made(name).double()
    ours = scratch.convert(copy.deepcopy(plain))
    truth = step(plain, name)
    for _ in range(2):
        assert max(errors(step(ours, name), truth)) <= (2**-17 if name in FLOAT32 else 1e-11)
    assert scratch.counts() == COUNTS.get(name, (4, {}))


@pytest.mark.parametrize("name", ["Bloom", "Llama", "GptOss"])
def test_padding(name):
    plain = made(name)
    ours = scratch.convert(copy.deepcopy(plain))
    assert max(errors(step(ours, name, PADDED), step(plain, name, PADDED))) <= 2**-10
    assert scratch.counts().taken == 2


@pytest.mark.parametrize("name", ["GPTNeo", "Bloom", "Falcon", "GPTJ", "Llama", "GptOss"])
def test_generation(name):
    plain = made(name)
    ours = scratch.convert(copy.deepcopy(plain))
    with torch.no_grad():
        truth, found = (
            model.generate(IDS, attention_mask=PADDED, min_new_tokens=4, max_new_tokens=4, do_sample=False)
            for model in (plain, ours)
        )
    assert torch.equal(found, truth)
    assert scratch.counts().taken == 8
