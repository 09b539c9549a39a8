"""onnxruntime's and OpenVINO's fused attention, where they are installed: forward, with shared buffers.

Beyond :mod:`pyattn.cli.bench.sides.runtimes`: attention without a mask, grouped heads, and OpenVINO in bfloat16.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

GROUPED = """
<ir_version: 11, opset_import: ["" : 23, "com.microsoft" : 1]>
graph (float[{q}] q, float[{k}] k, float[{k}] v) => (float[{q}] out, float[B, H, T, D] keys, float[B, H, T, D] values)
<int32[{batch}] last = {{{last}}}, int32 total = {{{tokens}}}>
{{
    out, keys, values = com.microsoft.GroupQueryAttention <num_heads = {heads}, kv_num_heads = {heads_kv}>
        (q, k, v, "", "", last, total)
}}"""
"""Causal, (B, T, H D); it also writes the KV cache."""

CACHED = """
<ir_version: 11, opset_import: ["" : 23, "com.microsoft" : 1]>
graph (float[{q}] q, float[{new}] k, float[{new}] v, float[{cache}] past_k, float[{cache}] past_v)
    => (float[{q}] out, float[{cache}] keys, float[{cache}] values)
<int32[{batch}] last = {{{last}}}, int32 total = {{{tokens}}}>
{{
    out, keys, values = com.microsoft.GroupQueryAttention <num_heads = {heads}, kv_num_heads = {heads_kv}>
        (q, k, v, past_k, past_v, last, total)
}}"""
"""One token over a cache (B, H, T, D), to whose end it writes its own key and value."""

FULL = """
<ir_version: 11, opset_import: ["" : 23, "com.microsoft" : 1]>
graph (float[{q}] q, float[{k}] k, float[{k}] v) => (float[{q}] out)
{{
    out = com.microsoft.MultiHeadAttention <num_heads = {heads}> (q, k, v)
}}"""
"""Without a mask, for as many heads of k and v as of q."""


class Session:
    """onnxruntime, one thread as torch has, inputs and outputs bound once; a call returns out (B, H, T, D)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        parser, runtime = import_module("onnx.parser"), import_module("onnxruntime")
        batch, heads, _, _ = q.shape
        over_cache = q.shape[2] == 1 and not causal
        new = (k[:, :, -1:], v[:, :, -1:]) if over_cache else (k, v)
        self._inputs = [t.transpose(1, 2).flatten(2).contiguous() for t in (q, *new)]
        shapes = {name: ", ".join(map(str, t.shape)) for name, t in zip("qk", self._inputs, strict=False)}
        shapes |= {"new": shapes["k"], "cache": ", ".join(map(str, k.shape))}
        last = ", ".join([str(k.shape[2] - 1)] * batch)
        sizes = {"batch": batch, "heads": heads, "heads_kv": k.shape[1], "tokens": k.shape[2], "last": last}
        text = CACHED if over_cache else GROUPED if causal else FULL
        model = parser.parse_model(text.format(**shapes, **sizes))
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._binding = session.io_binding()
        for name, tensor in zip("qkv", self._inputs, strict=True):
            self._binding.bind_cpu_input(name, tensor.numpy())
        outputs = [output.name for output in session.get_outputs()]
        self._binding.bind_output(outputs[0])
        if over_cache:  # in place, as a runtime that generates has it
            self._caches = [runtime.OrtValue.ortvalue_from_numpy(t.detach().numpy()) for t in (k, v)]
            for name, output, cache in zip("kv", outputs[1:], self._caches, strict=True):
                self._binding.bind_ortvalue_input(f"past_{name}", cache)
                self._binding.bind_ortvalue_output(output, cache)
        else:
            for output in outputs[1:]:
                self._binding.bind_output(output)
        self._run, self._heads = partial(session.run_with_iobinding, self._binding), heads

    def __call__(self) -> None:
        """Computes."""
        self._run()

    def out(self) -> Tensor:
        """The last result."""
        found = torch.from_numpy(self._binding.copy_outputs_to_cpu()[0])
        return found.unflatten(2, (self._heads, -1)).transpose(1, 2)


class Request:
    """OpenVINO with as many threads as torch, in q's dtype; a call computes."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        openvino, opset = import_module("openvino"), import_module("openvino.opset13")
        if q.shape[2] == 1:  # the heads of a group are queries
            q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        kind = {torch.float32: openvino.Type.f32, torch.bfloat16: openvino.Type.bf16}[q.dtype]
        self._inputs = [t.contiguous() for t in (q, k, v)]
        parameters = [opset.parameter(list(t.shape), kind) for t in self._inputs]
        result = opset.scaled_dot_product_attention(*parameters, causal=causal)
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": "f32" if q.dtype == torch.float32 else "bf16",
        }
        model = openvino.Model([result], parameters)
        self._request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
        self._dtype, self._shape = q.dtype, q.shape
        for place, tensor in enumerate(self._inputs):
            self._request.set_input_tensor(place, self._shared(openvino, tensor, kind))

    @staticmethod
    def _shared(openvino: Any, tensor: Tensor, kind: Any) -> Any:
        if tensor.dtype == torch.float32:
            return openvino.Tensor(tensor.numpy(), shared_memory=True)
        return openvino.Tensor(tensor.view(torch.int16).numpy(), list(tensor.shape), kind)

    def __call__(self) -> None:
        """Computes."""
        self._request.infer()

    def out(self) -> Tensor:
        """The last result."""
        data = torch.from_numpy(self._request.get_output_tensor(0).data.copy())
        return data.view(self._dtype).view(self._shape)


class Late:
    """A side that compiles at its first call, whose result is then at ``out``."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._program: Any = None

    def __call__(self) -> Any:
        """Computes; the first call returns out too."""
        if self._program is None:
            self._program = self._make()
            self._program()
            return self._program.out()
        return self._program()


def forwards(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Late]:
    """The sides that are installed and have such an operator; others say why at their first call."""
    found: dict[str, Late] = {}
    if all(map(find_spec, ("onnx", "onnxruntime"))):
        found["onnxruntime"] = Late(lambda: _session(q, k, v, causal))
    if find_spec("openvino"):
        found["OpenVINO"] = Late(lambda: _request(q, k, v, causal))
    return found


def _session(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Session:
    if q.dtype != torch.float32:
        raise ValueError("its operators on a CPU take float32")
    if not causal and q.shape[1] != k.shape[1] and q.shape[2] > 1:
        raise ValueError("grouped heads need its causal operator")
    return Session(q, k, v, causal)


def _request(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Request:
    if q.shape[1] != k.shape[1] and q.shape[2] > 1:
        raise ValueError("its operator has no grouped heads")
    return Request(q, k, v, causal)
