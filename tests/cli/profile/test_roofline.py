"""Promise: a roofline counts what it says it counts, and its picture has every product and both limits."""

import pytest
import torch
from matplotlib.figure import Figure

from pyattn.cli.profile import roofline
from pyattn.cli.profile.roofline import Machine, Point

LIMITS = Machine(peak=100e9, copy=8e9, read=10e9)


def test_the_bound_is_the_peak_or_what_memory_delivers():
    assert LIMITS.bound(4.0) == 40e9
    assert LIMITS.bound(10.0) == LIMITS.bound(1e9) == LIMITS.bound(float("inf")) == 100e9


def test_bytes_are_those_of_a_phase_s_tensors_once():
    tensors = {name: torch.zeros(n, dtype=torch.bfloat16) for n, name in enumerate(("q", "k", "v", "out", "dout"), 1)}
    times = dict.fromkeys(("pack", "S = Q K^T", "O = P V", "dV = P^T dO", "store"), (2.0, 60.0))
    found = roofline.points({"forward": times, "backward": times, "merge_out": times}, tensors)
    sizes = {(point.pass_name, point.phase): point.bytes // 2 for point in found}
    assert sizes == {
        ("forward", "pack"): 0,
        ("forward", "S = Q K^T"): 1 + 2,
        ("forward", "O = P V"): 3,
        ("forward", "dV = P^T dO"): 0,
        ("forward", "store"): 4,
        ("forward", "all"): 1 + 2 + 3 + 4,
        ("backward", "pack"): 0,
        ("backward", "S = Q K^T"): 1 + 2,
        ("backward", "O = P V"): 0,
        ("backward", "dV = P^T dO"): 5,
        ("backward", "store"): 1 + 2 + 3,
        ("backward", "all"): 1 + 2 + 3 + 4 + 5 + 1 + 2 + 3,
    }
    scores, whole = found[1], found[5]
    assert (scores.intensity, scores.rate) == (60 / 6, 30.0)
    assert (whole.seconds, whole.flops) == (10.0, 300.0)


def test_limits_are_those_of_a_thread(monkeypatch):
    seconds = iter([9.0, 2.0, 8.0, 8.0, 8.0, 4.0, 1.0, 5.0, 5.0, 5.0])
    monkeypatch.setattr(roofline, "STREAMED", 400)
    monkeypatch.setattr(roofline, "once", lambda call, repeats: call() is not None and next(seconds))
    assert roofline.machine(7.0, 2) == (7.0, 2 * 400 / 2.0 / 2, 400 / 1.0 / 2)


def test_a_phase_without_products_is_shown_in_bytes(capsys):
    found = [
        Point("forward", "pack", 1e-3, 0, 0),
        Point("forward", "S = Q K^T", 1e-3, 50e6, 10**7),
        Point("forward", "store", 1e-3, 0, 4 * 10**6),
    ]
    roofline.show(found, LIMITS)
    _, head, _, columns, *lines = capsys.readouterr().out.splitlines()
    assert (
        head == "roofline of a thread: peak 100 GFLOP/s, read 10.0 GB/s, copy 8.0 GB/s; bytes of tensors, once a call"
    )
    assert columns.split() == ["forward", "ops/byte", "GFLOP/s", "bound", "of", "it", "MB", "GB/s"]
    assert [line.split() for line in lines] == [
        ["pack"],
        ["S", "=", "Q", "K^T", "5.0", "50.0", "50", "100%", "10.00", "10.00"],
        ["store", "4.00", "4.00"],
    ]
    assert columns.index("GB/s") + 4 == len(lines[1]) == len(lines[2])


def test_run(tmp_path, shown, monkeypatch):
    """The picture is a PNG; its labels name each product, both passes and the limits."""
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure) or save(figure, *args, **kwargs)
    )
    monkeypatch.setattr(roofline, "STREAMED", 2**16)
    path = tmp_path / "roofline.png"
    printed = shown(f"profile --shapes 1x2x70x8 --threads 1 --roofline {path}").out
    assert f"written to {path}" in printed
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    labels = [line.get_label() for line in axes.lines]
    assert [label.split()[0] for label in labels[:3]] == ["read", "copy", "peak"]
    assert [label.split(",")[0] for label in labels[3:]] == [
        "forward: S = Q K^T",
        "forward: O = P V",
        "forward: all",
        "backward: S = Q K^T",
        "backward: dP = dO V^T",
        "backward: dV = P^T dO",
        "backward: dK = dS^T Q",
        "backward: dQ = dS K",
        "backward: all",
    ]
    assert "1x2x70x8 float32" in axes.get_title()
    assert "without products: forward pack " in axes.get_title()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shapes 1x1x9x4 1x1x9x8", "--roofline takes one of --shapes, got 1x1x9x4 1x1x9x8"),
        ("--device cuda", "--device must be cpu with --roofline, got cuda"),
    ],
)
@pytest.mark.usefixtures("small_gpu")
def test_bad_input(options, message, refusal):
    assert refusal(f"profile --roofline x.png {options}") == message
