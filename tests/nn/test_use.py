"""Promise: modules run natively in training and evaluation, and refuse with the values what they can't do."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.modules import (
    ARGUMENTS,
    CONTEXT_LENGTH,
    D_IN,
    D_OUT,
    EXTRAS,
    WITH_EXTRAS,
    assert_same,
    class_of,
    doubles,
    every_module,
    output,
    pair,
    sequences,
    set_dropout,
)

import pyattn
from pyattn import nn, reference
from pyattn.nn import heads

WITH_DROPOUT = [name for name in ARGUMENTS if not name.startswith(("Simplified", "SelfAttention"))]


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_in_training(name):
    native, plain = doubles(name)
    set_dropout(native, 0.5)
    draws = 1000
    x = torch.randn(7, D_IN, dtype=torch.float64)
    expected = output(plain, x[None])[0]
    with torch.no_grad():
        out = output(native, x.expand(draws, 7, D_IN))
        output(native, x[None])
    standard_error = out.std(0) / draws**0.5
    assert (standard_error > 0).all()
    assert ((out.mean(0) - expected).abs() <= 6 * standard_error).all(), "by chance: 2e-9 for each of <= 84 numbers"
    assert_same(output(native.eval(), x[None])[0], expected)


def test_dropout_of_everything():
    native = nn.CausalAttention(D_IN, D_OUT, CONTEXT_LENGTH, dropout=1.0)
    x = torch.randn(2, 7, D_IN)
    assert not native(x).any()
    assert not any(t.any() for t in native(x, need_weights=True))


def test_weights_returned_in_training_are_those_used():
    native = nn.SingleHeadSelfAttention(D_IN, D_OUT, dropout=0.5).double()
    x = sequences(2, 7)
    out, weights = native(x)
    assert (weights == 0).sum() > 2 * 21
    assert_same(out, weights @ native.v(x))


@pytest.mark.parametrize("name", WITH_EXTRAS)
def test_weights_of_heads_in_training_are_those_used(name):
    native = class_of(name)(*ARGUMENTS[name], **EXTRAS["all"]).double()
    native.dropout.p = 0.5
    x = sequences(2, 7)
    out, weights = native(x, need_weights=True)
    v = (native.W_v if name == "Attention" else native.W_value)(x).unflatten(-1, (-1, native.head_dim)).transpose(1, 2)
    v = v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
    project = native.W_o if name == "Attention" else native.out_proj
    assert_same(out, project((weights @ v).transpose(1, 2).flatten(2)))


@every_module
def test_native_attention_gets_views(name, monkeypatch):
    calls = []

    def spy(q, k, v, **options):
        calls.append((q, k, v))
        return attention(q, k, v, **options)

    attention = heads.attention
    monkeypatch.setattr(heads, "attention", spy)
    native, _ = pair(name)
    native(torch.randn(2, 7, D_IN))
    assert len(calls) == (2 if name.endswith("Wrapper") else 1)
    for tensor in calls[0]:
        side_by_side = tensor.stride(3) == 1 and tensor.stride(2) >= tensor.stride(1)
        assert side_by_side, "a token's heads lie together, as projections write them"


def test_trace_shapes(capsys):
    for module in pair("SingleHeadSelfAttention", 4, 2, 0.0, True):
        module(torch.rand(1, 5, 4))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[:2] == lines[2:]


@pytest.mark.parametrize(
    ("size", "d_model", "num_heads"), [("small", 768, 12), ("medium", 1024, 16), ("large", 1280, 20), ("xl", 1600, 25)]
)
def test_gpt2_factories(size, d_model, num_heads):
    with torch.device("meta"):
        module = getattr(nn, f"create_gpt2_{size}_attention")()
        biased = getattr(nn, f"create_gpt2_{size}_attention")(dropout=0.0, qkv_bias=True)
    assert (module.d_in, module.d_out, module.context_length, module.dropout.p) == (d_model, d_model, 1024, 0.1)
    assert (module.num_heads, module.head_dim, module.W_query.bias) == (num_heads, 64, None)
    assert (biased.dropout.p, biased.W_query.bias.shape) == (0.0, (d_model,))
    assert nn.GPT2_CONFIGS[f"gpt2-{size}"]["num_heads"] == num_heads


@every_module
def test_input_errors(name):
    native, _ = pair(name)
    with pytest.raises(TypeError, match=r"^pyattn: x must be a floating-point tensor, got torch.int64$"):
        native(torch.ones(2, 7, D_IN, dtype=torch.int64))
    rank = r"^pyattn: x must be \(batch, seqlen, d_in\).*, got shape \(1, 2, 7, 12\)$"
    with pytest.raises(ValueError, match=rank):
        native(torch.ones(1, 2, 7, D_IN))
    if name == "SimplifiedSelfAttention":
        return
    with pytest.raises(TypeError, match=r"must have the dtype of the weights, got torch.float64 and torch.float32$"):
        native(torch.ones(2, 7, D_IN, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^pyattn: the last dimension of x must be 12, got shape \(2, 7, 13\)$"):
        native(torch.ones(2, 7, D_IN + 1))


@pytest.mark.parametrize("name", ["CausalAttention", "MultiHeadAttentionWrapper", "MultiHeadAttention"])
def test_input_longer_than_context(name):
    native, _ = pair(name)
    with pytest.raises(ValueError, match=r"^pyattn: seqlen must not exceed context_length, got 20 and 19$"):
        native(torch.ones(2, CONTEXT_LENGTH + 1, D_IN))


def test_mask_errors():
    native, _ = pair("Attention")
    x = torch.ones(2, 7, D_IN)
    with pytest.raises(
        TypeError, match=r"^pyattn: mask must be bool, True = masked out \(numbers .* are bias\), got torch.float32$"
    ):
        native(x, torch.ones(7, 7))
    with pytest.raises(TypeError, match=r"^pyattn: mask must be Tensor, got 'causal'$"):
        native(x, "causal")
    for shape in [(7,), (7, 6), (3, 7, 7), (2, 2, 7, 7), (1, 2, 3, 7, 7)]:
        with pytest.raises(ValueError, match=re.escape(f"got {shape} for (2, 3, 7, 7)")):
            native(x, torch.ones(shape, dtype=torch.bool))


def test_modules_come_with_the_package():
    assert pyattn.nn is nn


def test_the_books_variants_have_a_home_of_their_own():
    """pyattn.nn keeps the nouns, and the names of pyattn.reference are the same in both homes."""
    classes = {name for name in nn.__all__ if isinstance(getattr(nn, name), type)}
    assert classes == classes & set(reference.__all__)
    assert nn.book.__all__ == reference.book.__all__
    assert set(nn.book.__all__) & {*dir(nn), *dir(reference)} == {"MultiHeadLatentAttention"}
    named = {name.removeprefix("book.") for name in ARGUMENTS}
    without_masks = {"MultiHeadAttentionWithDSA", "LightningIndexer"}  # tests/nn/test_selecting.py
    assert classes | set(nn.book.__all__) == named | without_masks | {"SelfAttention", "Ch03_MHA"}


def test_the_product_does_not_import_the_reference():
    """The reference serves only tests and comparisons."""
    root = Path(pyattn.__file__).parent
    sources = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
    importing = {name for name, text in sources.items() if re.search(r"^\s*(from|import)\b.*\breference\b", text, re.M)}
    importing = {name for name in importing if not name.startswith("reference/")}
    assert importing == {"cli/gpt.py", "cli/bench/sides/contenders.py"}


def test_no_module_reads_the_private_names_of_another():
    """A name with an underscore may change together with its file; private modules may be imported."""
    root = Path(pyattn.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pyattn":
                home = root.parent.joinpath(*node.module.split("."))
                private = [name.name for name in node.names if re.match("_[^_]", name.name)]
                assert all(any(home.glob(f"{name}.*")) for name in private), (path.relative_to(root), private)


@pytest.mark.parametrize("name", [name for name in WITH_DROPOUT if not name.startswith("MHAPyTorch")])
def test_identity_in_place_of_dropout(name):
    """People disable dropout for good by replacing it with nn.Identity."""
    native, plain = doubles(name)
    for twin in (native, plain):
        for module in twin.modules():
            if hasattr(module, "dropout"):
                module.dropout.p = 0.5
                module.dropout = torch.nn.Identity()
    x = sequences(2, 7)
    assert native.training
    assert_same(output(native, x), output(plain, x))


def test_other_modules_in_place_of_dropout():
    native, _ = pair("MultiHeadAttention")
    native.dropout = torch.nn.AlphaDropout(0.5)
    with pytest.raises(TypeError, match=r"^pyattn: dropout must be nn.Dropout or nn.Identity, got AlphaDropout$"):
        native(torch.ones(2, 7, D_IN))


@every_module
@pytest.mark.parametrize(
    ("x", "got"),
    [(np.ones((2, 7, D_IN), np.float32), "numpy.ndarray of shape (2, 7, 12)"), (None, "None"), ([1.0], "[1.0]")],
    ids=["array", "None", "list"],
)
def test_what_is_no_tensor(name, x, got):
    native, _ = pair(name)
    with pytest.raises(TypeError, match=f"^pyattn: x must be Tensor, got {re.escape(got)}$"):
        native(x)


def test_projections_can_be_replaced():
    """The book's appendix E replaces a Linear by a LoRA module, which has no weight attribute."""
    native, plain = doubles("MultiHeadAttention")
    x = sequences(2, 7)
    for module in (native, plain):
        module.W_query = torch.nn.Sequential(module.W_query, torch.nn.Tanh())
    assert_same(native(x), plain(x))
    native.load_state_dict(plain.state_dict(), strict=True)
