"""A call and its gradients beside the reference's, for every build; the line that it prints says which build it was."""

from importlib.metadata import requires

import torch

from pyattn import _C, attention, reference

inputs = [torch.randn(2, 3, 70, 16, requires_grad=True) for _ in range(3)]
results = []
for function in (attention, reference.attention):
    out = function(*inputs)
    results.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))
wanted = [r for r in requires("pyattn") or () if r.startswith("torch")]
print(_C.__file__, _C.compiler, _C.active_isa(), f"torch {torch.__version__}", wanted)
