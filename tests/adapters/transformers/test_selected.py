"""Promise: keys that a model selects, sinks of each query, and masks that layers change, are those of eager attention.

Lists of keys and blocks become a bool mask, exactly. A mask that was made for other sizes is never used.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.adapters import tiny
from support.adapters.models import IDS, PADDING, ROUNDINGS, results
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pyattn import attention, masks
from pyattn.adapters import transformers as adapter
from pyattn.adapters.transformers import attention_function, models
from pyattn.adapters.transformers.mask import Mask

BATCH, HEADS, GROUPS, QUERIES, KEYS = 2, 4, 2, 5, 7
DECODER = nn.Module()
DECODER.config = SimpleNamespace(index_block_size=3)


def inputs(**changes: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = {"batch": BATCH, "queries": QUERIES, "keys": KEYS} | changes
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sizes["batch"], heads, length, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, length in ((HEADS, sizes["queries"]), (GROUPS, sizes["keys"]), (GROUPS, sizes["keys"]))
    )
    return q, k, v


INDICES = torch.tensor([[0, 2, -1], [1, 1, 4], [-1, -1, -1], [6, 3, 0], [4, 5, 6]], dtype=torch.int32).expand(2, -1, -1)
BLOCKS = torch.tensor([[0, 2], [1, -1], [-1, -1], [2, 2], [0, 1]]).repeat(BATCH, GROUPS, 1, 1)
BLOCKS[1, 1] = BLOCKS[0, 0].flip(0)


def listed(indices: Tensor, keys: int) -> Tensor:
    """bool (..., keys), one element at a time."""
    seen = torch.zeros(*indices.shape[:-1], keys, dtype=torch.bool)
    for *row, _ in torch.ones_like(indices).nonzero().tolist():
        for key in indices[tuple(row)].tolist():
            if key >= 0:
                seen[(*row, key)] = True
    return seen


SELECTED: dict[str, tuple[dict[str, Tensor], Tensor]] = {
    "indices": ({"indices": INDICES}, listed(INDICES, KEYS)[:, None]),
    "blocks": (
        {"block_indices": BLOCKS},
        listed(BLOCKS, 3).repeat_interleave(3, -1)[..., :KEYS].repeat_interleave(HEADS // GROUPS, 1),
    ),
}
SEEN = torch.rand(BATCH, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(2)) < 0.7
RANGES = masks.KeyRanges(torch.tensor([[[0, 5]] * QUERIES, [[2, 7]] * QUERIES]), whole=True)
BIAS = torch.randn(BATCH, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
SHAPE = (BATCH, 1, QUERIES, KEYS)
MASKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "none": (None, {"causal": True, "q_offset": 0}),
    "causal": (Mask(SHAPE), {"causal": True, "q_offset": 0}),
    "ranges": (Mask(SHAPE, RANGES), {"causal": False, "key_ranges": RANGES}),
    "pairs": (Mask(SHAPE, pairs=SEEN), {"causal": False, "mask": SEEN}),
    "bool": (SEEN, {"causal": False, "mask": SEEN}),
    "float": (BIAS, {"causal": False, "bias": BIAS}),
    "key ranges": (RANGES, {"causal": False, "key_ranges": RANGES}),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", SELECTED)
def test_lists_are_a_bool_mask(name, mask):
    """In addition to every kind of mask, gradients as well."""
    (given, options), (arguments, shown) = MASKS[mask], SELECTED[name]
    sides = []
    for ours in (True, False):
        q, k, v = inputs()
        if ours:
            out, _ = attention_function(DECODER, q, k, v, given, **arguments)
        else:
            seen = shown & options["mask"] if "mask" in options else shown
            out = attention(q, k, v, **options | {"mask": seen}).transpose(1, 2)
        out.square().sum().backward()
        sides.append([out, q.grad, k.grad, v.grad])
    for found, expected in zip(*sides, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mask", MASKS)
def test_sinks_of_each_query(mask):
    """The softmax has one more column without a value; a query that sees no key has out 0 and finite gradients."""
    given, options = MASKS[mask]
    if mask == "pairs":
        given, options = Mask(SHAPE, pairs=SEEN.index_fill(2, torch.tensor(1), False)), dict(options)
        options["mask"] = given.pairs
    sinks = torch.randn(BATCH, HEADS, QUERIES, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    sides = []
    for ours in (True, False):
        q, k, v = inputs()
        sink = sinks.clone().requires_grad_()
        if ours:
            out, weights = attention_function(DECODER, q, k, v, given, sinks=sink, output_attentions=True)
        else:
            scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5 + options.get("bias", 0.0)
            places = torch.arange(KEYS)
            seen = (
                torch.ones(QUERIES, KEYS, dtype=torch.bool).tril() if options["causal"] else options.get("mask", True)
            )
            if "key_ranges" in options:
                begin, end = RANGES[:, None].split(1, -1)
                seen = torch.as_tensor((begin <= places) & (places < end))
            scores = scores.masked_fill(~torch.as_tensor(seen), -torch.inf)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
            out = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
        assert weights is not None
        out.square().sum().backward()
        sides.append([out, weights, q.grad, k.grad, v.grad, sink.grad])
    for found, expected in zip(*sides, strict=True):
        assert found is not None
        torch.testing.assert_close(found, expected)


def test_a_sink_of_minus_infinity_takes_nothing():
    q, k, v = inputs()
    hidden = Mask(SHAPE, pairs=SEEN.index_fill(2, torch.tensor(1), False))
    out, _ = attention_function(DECODER, q, k, v, hidden, sinks=torch.full((BATCH, HEADS, QUERIES, 1), -torch.inf))
    assert torch.equal(out, attention_function(DECODER, q, k, v, hidden)[0])


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("indices must be below 7, got 7", {"indices": INDICES + 1}),
        ("indices must be (B, Sq, n), got shape (2, 5)", {"indices": INDICES[..., 0]}),
        ("indices must be (B, Sq, n), got shape (2, 4, 3)", {"indices": INDICES[:, 1:]}),
        ("block_indices must be below 3, got 3", {"block_indices": BLOCKS + 1}),
        ("H a divisor of Hq, got shape (2, 3, 5, 2)", {"block_indices": BLOCKS[:, [0, 0, 1]]}),
        ("sinks must be (B, Hq, Sq, 1), got shape (4,)", {"sinks": torch.zeros(4)}),
        ("sinks must be None where s_aux is given", {"sinks": torch.zeros(2, 4, 5, 1), "s_aux": torch.zeros(4)}),
    ],
)
def test_wrong_shapes(message, arguments):
    with pytest.raises(ValueError, match=r"^pyattn: ") as caught:
        attention_function(DECODER, *inputs(), None, **arguments)
    assert message in str(caught.value)


def test_a_layer_without_a_block_size():
    with pytest.raises(TypeError, match=r"^pyattn: module.config.index_block_size must be int, got None"):
        attention_function(nn.Module(), *inputs(), None, block_indices=BLOCKS)


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_packed_sequences_refuse(name):
    given = {"indices": INDICES[:1], "block_indices": BLOCKS[:1], "sinks": torch.zeros(1, HEADS, QUERIES, 1)}[name]
    with pytest.raises(NotImplementedError, match=f"^pyattn: cu_seq_lens_q must come with a mask if {name} is given"):
        attention_function(DECODER, *inputs(batch=1), None, cu_seq_lens_q=torch.tensor([0, QUERIES]), **{name: given})


@pytest.mark.parametrize("mask", ["causal", "ranges", "pairs"])
@pytest.mark.parametrize("changes", [{"keys": KEYS + 2}, {"keys": KEYS - 2}, {"queries": 4}, {"queries": 1}])
def test_a_mask_for_other_sizes_is_refused(mask, changes):
    """A layer that appends keys, or drops queries, must say so to the mask."""
    sizes = {"queries": QUERIES, "keys": KEYS} | changes
    message = (
        f"made for {sizes['queries']} queries and {sizes['keys']} keys, the call's, got one for {QUERIES} and {KEYS}"
    )
    with pytest.raises(ValueError, match=f"^pyattn: attention_mask must be {message}"):
        attention_function(DECODER, *inputs(**changes), MASKS[mask][0])


@pytest.mark.parametrize("rows", [slice(-1, None), slice(-3, None), slice(0, 1), slice(1, 3), slice(None), slice(0, 4)])
@pytest.mark.parametrize("mask", ["causal", "ranges", "pairs"])
def test_a_mask_of_some_queries(mask, rows):
    """Gemma 4 cuts queries and masks before its last layers; cut twice is cut once."""
    q, k, v = inputs()
    given = MASKS[mask][0]

    def run(part, mask, **arguments):
        return attention_function(DECODER, q[:, :, part], k, v, mask, **arguments)[0]

    whole = run(slice(None), given)
    torch.testing.assert_close(run(rows, given[:, :, rows, :]), whole[:, rows])
    later = range(QUERIES)[1:][rows]
    twice = given[:, :, 1:, :][:, :, rows, :]
    torch.testing.assert_close(run(slice(later.start, later.stop), twice), whole[:, 1:][:, rows])
    selected = run(rows, given[:, :, rows, :], indices=INDICES[:, rows])
    torch.testing.assert_close(selected, run(slice(None), given, indices=INDICES)[:, rows])


@pytest.mark.parametrize("index", [0, (slice(None), 0), (slice(None),) * 3 + (slice(3),), (..., slice(2))])
def test_other_parts_of_a_mask_are_refused(index):
    for given in (MASKS[name][0] for name in ("causal", "ranges", "pairs")):
        with pytest.raises(NotImplementedError, match=r"^pyattn: .* as the index of a mask"):
            given[index]


SELECTING = ["axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text"]
OTHERS = ["deepseek_v4", "gemma4_text", "inkling2_text", "inkling2_loop_text"]
THERE = [name for name in SELECTING + OTHERS if name in tiny.architectures()]  # not all in older versions


@pytest.mark.usefixtures("softmax_in_its_own_dtype")
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", THERE)
def test_models(name, padding, monkeypatch):
    """Logits and gradients at tokens, and tokens generated with a cache."""
    adapter.register()
    given = set[str]()

    def spying(*arguments, **named):
        given.update(name for name, argument in named.items() if isinstance(argument, Tensor))
        return attention_function(*arguments, **named)

    monkeypatch.setitem(AttentionInterface._global_mapping, "pyattn", spying)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "pyattn", spying)
    model = tiny.model(name, "CausalLM")
    if not name.startswith("inkling"):  # transformers computes their experts in float32
        model = model.double()
    rounding = ROUNDINGS if model.dtype == torch.float64 else 2**-13
    mask, sides = PADDING[padding], []
    for side in ("pyattn", "eager"):
        out, gradients = results(model, side, mask, input_ids=IDS, attention_mask=mask)
        found = {"logits": out} | gradients
        alone = name.startswith("minimax") and padding == "left"  # a token may select padding alone: eager averages it
        if padding != "right" and not alone:  # the last token must not be padding
            options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            options |= {"output_logits": True, "return_dict_in_generate": True}
            found["generated"] = torch.stack(model.generate(IDS, attention_mask=mask, **options).logits)
        sides.append(found)
    assert sides[0].keys() == sides[1].keys()
    assert name in ("deepseek_v4", "gemma4_text") or given & {"indices", "block_indices", "sinks"}
    largest = max(x.abs().max() for part, x in sides[1].items() if part not in ("logits", "generated"))
    for part, expected in sides[1].items():
        scale = expected.abs().max() if part in ("logits", "generated") else largest
        assert (sides[0][part] - expected).abs().max() <= rounding * scale, part


@pytest.mark.usefixtures("softmax_in_its_own_dtype")
@pytest.mark.skipif("deepseek_v4" not in THERE, reason="this transformers has no DeepSeek V4")
def test_appended_keys_are_refused_where_a_model_is_not_known(monkeypatch):
    """DeepSeek V4 appends keys, and to its mask if that is a tensor."""
    adapter.register()
    model = tiny.model("deepseek_v4", "CausalLM").double()
    model.set_attn_implementation("pyattn")
    monkeypatch.setattr(models, "EXTENDING", frozenset())
    with pytest.raises(
        ValueError, match=r"^pyattn: attention_mask must be made for 12 queries and \d+ keys.* for 12 and 12"
    ):
        model(IDS, attention_mask=PADDING["left"])
