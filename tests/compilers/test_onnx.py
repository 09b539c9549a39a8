"""Promise: torch.onnx.export takes callers of attention, and onnxruntime computes what pyattn does, for all lengths.

Graphs of all options and all modules take three quarters of a minute; the gate runs those tests.
"""

import copy
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest
import torch
from support import fresh
from support.yardstick import assert_accurate, in_double
from torch import Tensor, nn

from pyattn import attention, attention_varlen, reference
from pyattn import nn as modules
from pyattn.ops.onnx import DECOMPOSITIONS

# torch's own warnings while it traces.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]

DYNAMIC = torch.export.Dim.DYNAMIC
OPSETS = (None, 23)
"""torch's default, which decomposes attention, and the first opset that has ``Attention``."""


class Called(nn.Module):
    """A function as a module, which torch.onnx.export needs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def exported(
    function: Callable[..., Any],
    args: tuple[Tensor, ...],
    opset: int | None = None,
    dynamic: Any = None,
    **options: bool,
) -> Any:
    model = function if isinstance(function, nn.Module | torch.export.ExportedProgram) else Called(function).eval()
    return torch.onnx.export(
        model, args, dynamo=True, opset_version=opset, dynamic_shapes=dynamic, verbose=False, **options
    )


def count_of_attention(program: Any) -> int:
    return sum(node.op_type == "Attention" for node in program.model.graph)


def runs(program: Any) -> Callable[..., list[Tensor]]:
    """A function that runs the graph in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # only what ends the process; errors are raised
    options.intra_op_num_threads = 1
    model = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(*args: Tensor) -> list[Tensor]:
        arrays = {name: t.numpy() for name, t in zip(names, args, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]

    return run


def inputs(batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Tensor]:
    """q, k, v and the tensors of the options, with and without a dimension for heads."""
    begin, length = torch.randint(0, seqlen_k + 1, (2, batch, seqlen_q))
    bias = torch.randn(batch, 4, seqlen_q, seqlen_k)
    return {
        "q": torch.randn(batch, 4, seqlen_q, 8),
        "k": torch.randn(batch, 2, seqlen_k, 8),
        "v": torch.randn(batch, 2, seqlen_k, 5),
        "q_offset": torch.randint(-seqlen_q, seqlen_k, (batch,)),
        "key_ranges": torch.stack([begin, (begin + length).clamp(max=seqlen_k)], -1),
        "several": torch.randint(0, seqlen_k + 1, (batch, seqlen_q, 6)).sort(-1).values.unflatten(-1, (3, 2)),
        "mask": torch.rand(batch, 1, 1, seqlen_k) < 0.7,
        "shared": torch.randn(seqlen_q, seqlen_k).masked_fill(torch.rand(seqlen_q, seqlen_k) < 0.6, -torch.inf),
        "bias": bias.masked_fill(torch.rand_like(bias) < 0.3, -torch.inf),
        "alibi_slopes": torch.rand(batch, 4),
        "slopes": torch.rand(4),
        "sinks": torch.randn(4),
        "relative": torch.randn(4, 9),
    }


SIZES = ((2, 3, 6), (3, 7, 4), (1, 1, 9), (2, 9, 2))
"""Batch, queries and keys; the first is the exported size. With more queries than keys, some see none."""

DIMENSIONS: dict[str, dict[int, Any]] = {
    **{name: {0: DYNAMIC, 2: DYNAMIC} for name in "qkv"},
    "q_offset": {0: DYNAMIC},
    "key_ranges": {0: DYNAMIC, 1: DYNAMIC},
    "several": {0: DYNAMIC, 1: DYNAMIC},
    "mask": {0: DYNAMIC, 3: DYNAMIC},
    "shared": {0: DYNAMIC, 1: DYNAMIC},
    "bias": {0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC},
    "alibi_slopes": {0: DYNAMIC},
    "slopes": {},
    "sinks": {},
    "relative": {},
}

Options = dict[str, Any]

CALLS: list[Options] = [
    {},
    {"q_offset": 0},
    {"q_offset": -2, "window": (2, 0)},
    {"q_offset": "q_offset"},
    {"causal": False},
    {"causal": False, "window": (1, -1), "softmax_scale": 0.3},
    {"causal": False, "mask": "mask"},
    {"causal": False, "softcap": 1.5, "mask": "mask", "key_ranges": "key_ranges"},
    {"causal": False, "key_ranges": "several"},
]
"""Options, each a value or the name of an input."""

BY_HEAD: list[Options] = [
    {"bias": "bias"},
    {"alibi_slopes": "alibi_slopes", "causal": False, "q_offset": "q_offset"},
    {"sinks": "sinks", "bias": "shared", "causal": False, "window": (-1, 2)},
    {"sinks": "sinks", "bias": "bias", "alibi_slopes": "slopes", "key_ranges": "key_ranges", "window": (3, -1)},
    {"sinks": "sinks", "mask": "mask", "alibi_slopes": "slopes", "softcap": 2.0, "relative_bias": "relative"},
]
"""Further ones, whose options differ between heads."""


@pytest.mark.gate
@pytest.mark.parametrize("opset", OPSETS)
def test_masks_and_scores(opset):
    """One graph of many calls: at each size as accurate as plain PyTorch.

    Before ``Attention`` a mask is a mask, whatever it is made from, so a few calls have each kind of it. lse is
    exported alike with any opset: these calls have it in that graph, the others in the other one.
    """
    every = [*CALLS, *BY_HEAD]
    few = [CALLS[1], *CALLS[-2:], *BY_HEAD[-2:]]
    calls = few if opset is None else every
    results = [1 + ((call in few) == (opset is None)) for call in calls]

    def arguments(options: Options, tensors: dict[str, Tensor]) -> Options:
        named = {name: tensors[value] if isinstance(value, str) else value for name, value in options.items()}
        repeats = 2 if opset == 23 and options in BY_HEAD else 1  # onnxruntime 1.23 refuses 4 masks of 2 KV heads
        k, v = (tensors[name].repeat_interleave(repeats, 1) for name in "kv")
        return {"q": tensors["q"], "k": k, "v": v, **named}

    def every_call(*args: Tensor) -> list[Tensor]:
        tensors = dict(zip(DIMENSIONS, args, strict=True))
        return [
            t
            for options, n in zip(calls, results, strict=True)
            for t in attention(**arguments(options, tensors), return_lse=True)[:n]
        ]

    first, *others = (inputs(*sizes) for sizes in SIZES)
    # onnxscript's optimizer takes most of the time; modules are exported with it.
    args = tuple(first[name] for name in DIMENSIONS)
    # torch.onnx.export decomposes an exported program once less than a module.
    traced = torch.export.export(Called(every_call), args, dynamic_shapes=(tuple(DIMENSIONS.values()),), strict=False)
    program = exported(traced, (), opset, optimize=False)
    assert count_of_attention(program) == (opset is not None) * sum("softcap" not in options for options in calls)
    run = runs(program)
    for tensors in (first, *others):
        found = iter(run(*(tensors[name] for name in DIMENSIONS)))
        for options, n in zip(calls, results, strict=True):
            known = arguments(options, tensors)
            exact = in_double(known) | {name: known[name].double() for name in "qkv"}
            plain, exact = (reference.attention(**values, return_lse=True)[:n] for values in (known, exact))
            for result, rounded, truth in zip(("out", "lse"), plain, exact, strict=False):
                assert_accurate(f"{result} of {options}", next(found), rounded, truth)


def test_max_score():
    tensors = [torch.randn(2, 4, 5, 8), *torch.randn(2, 2, 2, 7, 8), torch.tensor([-2.0, 0.0, 2.0, 20.0])]

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return attention(q, k, v, sinks=sinks, q_offset=-1, return_lse=True, return_max_score=True)

    found = runs(exported(call, tuple(tensors), optimize=False))(*tensors)
    torch.testing.assert_close(found, [*call(*tensors)])


class Layers(nn.Module):
    """Every kind of layer over one input, as in a model."""

    def __init__(self, home: Any) -> None:
        super().__init__()
        sizes = {"d_in": 16, "d_out": 16, "context_length": 32, "dropout": 0.5, "num_heads": 4}
        made = [
            home.MultiHeadAttention(**sizes),
            home.MultiHeadAttentionWrapper(**sizes | {"num_heads": 2}),
            home.GroupedQueryAttention(16, 16, 0.5, num_heads=4, num_kv_groups=2),
            home.Attention(16, 4, 0.5),
            home.SelfAttention_v1(16, 8),
            home.SelfAttention_v2(16, 8),
            home.SimplifiedSelfAttention(),
        ]
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def module_with_every_extra() -> nn.Module:
    extras = {"window": (3, 0), "softcap": 3.0, "alibi": True, "sinks": True, "rotary": 10000.0}
    return modules.MultiHeadAttention(16, 16, 32, 0.5, 4, num_heads_kv=2, **extras).eval()


@pytest.mark.gate
@pytest.mark.parametrize("opset", OPSETS)
def test_modules(opset):
    plain, native = (Layers(home).eval() for home in (reference, modules))
    native.load_state_dict(plain.state_dict())
    expected_count = (opset is not None) * (len(native.layers) + 1)  # the wrapper has 2 heads
    extra = module_with_every_extra()
    plain.layers.append(extra), native.layers.append(extra)
    first, *others = (torch.randn(batch, seqlen, 16) for batch, seqlen in ((2, 6), (3, 9), (1, 1)))
    program = exported(native, (first,), opset, ({0: DYNAMIC, 1: DYNAMIC},))
    assert count_of_attention(program) == expected_count, "a softcap is no Attention"
    run = runs(program)
    exact = copy.deepcopy(plain).double()
    with torch.no_grad():
        for x in (first, *others):
            for found, rounded, truth in zip(run(x), plain(x), exact(x.double()), strict=True):
                assert_accurate("out", found, rounded, truth)


def test_a_module_of_fixed_sizes():
    """The batch, KV heads and heads per group have the same size, so sizes would broadcast in any role."""
    native, x = module_with_every_extra(), torch.randn(2, 6, 16)
    run = runs(exported(native, (torch.randn(2, 6, 16),)))
    with torch.no_grad():
        rounded, truth = native(x), copy.deepcopy(native).double()(x.double())
    assert_accurate("out", run(x)[0], rounded, truth)


def test_an_exported_program_that_was_saved(tmp_path):
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    torch.export.save(torch.export.export(Called(attention), (q, k, v)), tmp_path / "program.pt2")
    program = exported(torch.export.load(tmp_path / "program.pt2"), (), 23)
    assert [node.op_type for node in program.model.graph] == ["Attention"]
    plain, exact = reference.attention(q, k, v), reference.attention(q.double(), k.double(), v.double())
    assert_accurate("out", runs(program)(q, k, v)[0], plain, exact)


def test_half_precision_adds_to_scores_in_float32():
    q, k, v = torch.randn(3, 1, 4, 300, 8).half()
    slopes = torch.rand(4)  # distances above 2048 and their products with slopes round in float16
    run = runs(exported(lambda *qkv: attention(*qkv, alibi_slopes=slopes, q_offset=5000), (q, k, v)))
    wide = reference.attention(q.double(), k.double(), v.double(), alibi_slopes=slopes.double(), q_offset=5000)
    assert_accurate("out", run(q, k, v)[0], wide.half(), wide)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "dropout": (
        lambda q, k, v: attention(q, k, v, dropout_p=0.1),
        r"ONNX has no attention with dropout, got dropout_p=0\.1: call eval\(\) on the model",
    ),
    "packed": (
        lambda q, k, v: attention_varlen(q[0], k[0], v[0], torch.tensor([0, 4]), torch.tensor([0, 4]), 4, 4),
        "ONNX has no packed sequences, got attention_varlen",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_onnx_does_not_have_is_a_sentence(name):
    function, sentence = REFUSED[name]
    with pytest.raises(torch.onnx.OnnxExporterError, match=f"pyattn: {sentence}"):
        exported(function, tuple(torch.randn(3, 2, 4, 4, 8)))


def test_other_tracers_see_no_decomposition():
    """Inductor raises for operators with one if the environment variable CI is set."""
    assert not torch._decomp.get_decompositions(list(DECOMPOSITIONS))


def test_importing_pyattn_imports_nothing_for_it():
    heavy = {"onnx", "onnxscript", "onnxruntime", "sympy", "torch._dynamo"}
    code = f"import sys, pyattn; assert not {heavy} & sys.modules.keys(), {heavy} & sys.modules.keys()"
    process = fresh.python("-c", code)
    assert process.returncode == 0, process.stderr
