"""A device as torch knows it: whether it is here, its facts, and calls that run on it without Python between them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from support.gpu.device import Device

Call = Callable[[], Any]


def is_here(device: Device) -> bool:
    return device.name == "cpu" or torch.cuda.is_available()


def build_settings(device: Device) -> dict[str, str]:
    """CMake's settings for this GPU. The CPU's vector kernels are left out, because they take long to compile."""
    if device.name == "cpu":
        return {"PYATTN_ISAS": "", "PYATTN_CUDA": "OFF"}
    major, minor = torch.cuda.get_device_capability()
    return {"PYATTN_ISAS": "", "PYATTN_CUDA": "ON", "PYATTN_CUDA_ARCHITECTURES": f"{major}{minor}"}


def facts(device: Device) -> dict[str, Any]:
    """The device's name and the versions of the software on it."""
    if device.name == "cpu":
        return {"gpu": "none: a rehearsal", "torch": torch.__version__}
    return {
        "gpu": torch.cuda.get_device_name(),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def cache_bytes(device: Device) -> int:
    """Bytes of the largest cache, which must not be timed in place of memory."""
    return 0 if device.name == "cpu" else torch.cuda.get_device_properties(0).L2_cache_size


def together(device: Device, calls: Sequence[Call]) -> Call:
    """All of them in one call: on a GPU a captured graph's replay, without Python and the dispatcher between."""
    if device.name == "cpu":
        return lambda: [call() for call in calls]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return partial(_replay, graph, results)


def _replay(graph: torch.cuda.CUDAGraph, results: list[Any]) -> list[Any]:
    graph.replay()
    return results
