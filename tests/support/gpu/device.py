"""The devices that steps run on: a GPU or, in a rehearsal, this machine's processor with small sizes and few tests.

Nothing else in tests/gpu.py and its steps but hardware.py distinguishes them. A process that imports no more than this
has not imported torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A kind of device, and the sizes that suit it.

    Attributes:
        name: torch's name for it.
        backend: the backend that the suite tests.
        compilers: programs that a build needs besides CMake.
        laws: folders and files under tests/ with laws that every backend passes.
        only: the tests to run of any file, as pytest's -k takes it.
        shares: number of concurrent suite processes; a test keeps a processor busy, but hardly a GPU.
        dims: head dimensions that have kernels; the last three also have general scores and packed sequences.
        watched: head dimensions to run under compute-sanitizer.
        dtypes: dtypes for smoke and sanitizer; training takes the first two.
        speed: shape (B, H, T, D) and dtype of each comparison.
        decoding: shape (B, Hq, Hkv, Sk, D) of each comparison.
        counted: shape of the call whose kernels ncu measures.
        recipe: arguments of ``pyattn train``.
        seconds: time for each side of a comparison.
    """

    name: str
    backend: str
    compilers: tuple[str, ...]
    laws: tuple[str, ...]
    only: str
    shares: int
    dims: tuple[int, ...]
    watched: tuple[tuple[int, int], ...]
    dtypes: tuple[str, ...]
    speed: tuple[tuple[tuple[int, int, int, int], str], ...]
    decoding: tuple[tuple[int, int, int, int, int], ...]
    counted: tuple[int, int, int, int]
    recipe: tuple[str, ...]
    seconds: float


TOKENS, WIDTH = 2**14, 2048
"""Batch times seqlen, and heads times head_dim, of the timed shapes."""


def shape_of(seqlen: int, head_dim: int) -> tuple[int, int, int, int]:
    """The shape (B, H, T, D)."""
    return TOKENS // seqlen, WIDTH // head_dim, seqlen, head_dim


CUDA = Device(
    name="cuda",
    backend="cuda",
    compilers=("c++", "nvcc"),
    laws=("",),
    only="",
    shares=4,
    dims=(32, 96, 192, 64, 128, 256),
    watched=((64, 64), (128, 128), (256, 256), (20, 33)),
    dtypes=("bfloat16", "float32", "float16", "float64"),
    speed=(
        *((shape_of(n, d), "bfloat16") for d in (64, 128) for n in (2048, 4096, 8192, 16384)),
        *((shape_of(n, d), "float32") for d in (64, 128) for n in (2048, 4096)),
    ),
    decoding=(
        (1, 8, 8, 16384, 128),
        (1, 32, 8, 16384, 128),
        (1, 32, 8, 131072, 128),
        (1, 32, 1, 131072, 64),
        (16, 32, 8, 4096, 128),
    ),
    counted=shape_of(4096, 128),
    recipe=("--steps", "1200", "--heads", "2", "--eval-every", "100", "--sample", "0", "--seed", "0"),
    seconds=0.25,
)

CPU = Device(
    name="cpu",
    backend="scalar",
    compilers=("c++",),
    laws=("attention/test_merge.py",),
    shares=1,
    only="float32 and (1x2x1x30x90 or 1x3x3x40x30 or test_one_part or on_the_cpu) or on_the_cpu and not float",
    dims=(64,),
    watched=((20, 33),),
    dtypes=("float32",),
    speed=(((1, 2, 128, 16), "float32"),),
    decoding=((2, 4, 2, 128, 16),),
    counted=(1, 1, 32, 16),
    recipe=(
        *("--steps", "4", "--layers", "1", "--heads", "1", "--width", "8", "--context", "16", "--batch", "2"),
        *("--eval-every", "2", "--sample", "0", "--seed", "0"),
    ),
    seconds=0.01,
)

DEVICES = {device.name: device for device in (CUDA, CPU)}
