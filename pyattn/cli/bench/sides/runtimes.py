"""Attention of inference runtimes, if they are installed: contenders for the forward in float32 on a CPU.

A runtime compiles a graph of one operator for q, k, v (B, H, T, D). Inputs are
bound once, in the layout that the operator reads, so a call only computes. With
one thread, both runtimes compute in the calling thread, so its CPU time is theirs.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

import pyattn


class Program(NamedTuple):
    """An operator with its inputs.

    Attributes:
        run: computes.
        out: returns the last result (B, H, T, D).
        inputs: tensors read in place, so they must live as long as the program.
    """

    run: Callable[[], object]
    out: Callable[[], Tensor]
    inputs: object = None


GROUP_QUERY_ATTENTION = """
<ir_version: 11, opset_import: ["" : 23, "com.microsoft" : 1]>
graph (float[{shape}] q, float[{shape}] k, float[{shape}] v)
    => (float[{shape}] out, float[B, H, T, D] keys, float[B, H, T, D] values)
<int32[{batch}] last = {{{last}}}, int32 total = {{{seqlen}}}>
{{
    out, keys, values = com.microsoft.GroupQueryAttention <num_heads = {heads}, kv_num_heads = {heads}>
        (q, k, v, "", "", last, total)
}}"""
"""onnxruntime's fused causal attention on CPUs (B, T, H D); it also writes the KV cache."""


def _onnxruntime(q: Tensor, k: Tensor, v: Tensor) -> Program:
    parser, runtime = import_module("onnx.parser"), import_module("onnxruntime")
    batch, heads, seqlen, _ = q.shape
    inputs = [t.transpose(1, 2).flatten(2).contiguous() for t in (q, k, v)]
    last, shape = ", ".join([str(seqlen - 1)] * batch), ", ".join(map(str, inputs[0].shape))
    text = GROUP_QUERY_ATTENTION.format(shape=shape, batch=batch, heads=heads, seqlen=seqlen, last=last)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # only what ends the process; errors are raised
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other sides are timed between its calls
    session = runtime.InferenceSession(
        parser.parse_model(text).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    for name, tensor in zip("qkv", inputs, strict=True):
        binding.bind_cpu_input(name, tensor.numpy())
    for output in session.get_outputs():
        binding.bind_output(output.name)

    def out() -> Tensor:
        result: Tensor = torch.from_numpy(binding.copy_outputs_to_cpu()[0]).unflatten(2, (heads, -1)).transpose(1, 2)
        return result

    return Program(partial(session.run_with_iobinding, binding), out, inputs)


def _openvino(q: Tensor, k: Tensor, v: Tensor) -> Program:
    openvino, opset = import_module("openvino"), import_module("openvino.opset13")
    inputs = [t.contiguous().numpy() for t in (q, k, v)]
    parameters = [opset.parameter(list(t.shape), t.dtype) for t in inputs]
    model = openvino.Model([opset.scaled_dot_product_attention(*parameters, causal=True)], parameters)
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # torch and pyattn run on the same cores
        "INFERENCE_PRECISION_HINT": "f32",  # the default is bfloat16 on CPUs that have it
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    for i, tensor in enumerate(inputs):
        request.set_input_tensor(i, openvino.Tensor(tensor, shared_memory=True))
    return Program(request.infer, lambda: torch.from_numpy(request.get_output_tensor(0).data), inputs)


Compiler = Callable[[Tensor, Tensor, Tensor], Program]

COMPILERS: dict[str, tuple[tuple[str, ...], Compiler]] = {
    "onnxruntime GroupQueryAttention": (("onnx", "onnxruntime"), _onnxruntime),
    "OpenVINO": (("openvino",), _openvino),
}
"""By side, the packages it needs, and the function that compiles it."""


TOLERANCE = 1e-4
"""For inputs of variance 1: float32's rounding stays below 1e-5, bfloat16's is above 1e-3."""


class Forward:
    """A side of the benchmark: its first call compiles it and compares its result with ours, later calls run it."""

    compiler: Compiler
    inputs: tuple[Tensor, Tensor, Tensor]

    def __init__(self, compiler: Compiler, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.compiler, self.inputs = compiler, (q, k, v)
        self.program: Program | None = None

    def __call__(self) -> None:
        """Runs it.

        Raises:
            ValueError: the result differs from ours by more than TOLERANCE.
        """
        if self.program is not None:
            self.program.run()
            return
        program = self.compiler(*self.inputs)
        program.run()
        difference = float((program.out() - pyattn.attention(*self.inputs)).abs().max())
        if not difference <= TOLERANCE:
            raise ValueError(f"out must differ from ours by at most {TOLERANCE}, got {difference:.1e}")
        self.program = program


def forwards(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Forward]:
    """The sides for q, k, v (B, H, T, D) that are installed and support them: float32 on a CPU."""
    if q.dtype != torch.float32 or q.device.type != "cpu":
        return {}
    there = {name: compiler for name, (packages, compiler) in COMPILERS.items() if all(map(find_spec, packages))}
    return {name: Forward(compiler, q, k, v) for name, compiler in there.items()}
