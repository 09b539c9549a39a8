"""Plants faults in a copy of the native side, one at a time, and tells which of them the suite catches.

Not collected by pytest: run it by hand where PyTorch, pytest, pybind11, cmake and ninja are installed, after a change
of the kernels or of the tests. A fault whose old text is not there exactly once is an error: the list can't rot.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pybind11

ROOT = Path(__file__).parent.parent
TESTS = ("accuracy", "laws", "layouts", "dropout", "autograd", "errors", "build", "exp2")
WANTED = 0.95
TIMEOUT = 400

# An editable install would find the package it was made from, here and in the processes that tests start.
SITE = "import sys\nsys.meta_path = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
RUN = """
import sys
from pathlib import Path
import pyattn, pyattn._C, pytest
assert all(Path(m.__file__).is_relative_to(sys.argv[1]) for m in (pyattn, pyattn._C)), pyattn._C.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""

# Files and their faults: the name, the old text, the new.
FAULTS = """
# csrc/cpu/mask.h
the diagonal is not seen: query(r) + q_offset + 1, 0 => query(r) + q_offset, 0
first row one late: clamp(j - q_offset, 0, seqlen_q) * group => clamp(j - q_offset + 1, 0, seqlen_q) * group
sign of q_offset: : p.mask.q_offset, -seqlen_q => : -p.mask.q_offset, -seqlen_q
negative q_offset cut off: : p.mask.q_offset, -seqlen_q => : p.mask.q_offset, 0
large q_offset cut off: -seqlen_q, seqlen_k); => -seqlen_q, max(0, seqlen_k - seqlen_q));
offset of the first sequence for all: p.mask.q_offsets[b] => p.mask.q_offsets[0]
first query head of the group for all: query_head(r) * view.stride_h => (h_kv * group) * view.stride_h
head and position strides of keys swapped: h_kv * view.stride_h + j * view.stride_s, view.stride_s
=> h_kv * view.stride_s + j * view.stride_h, view.stride_h
heads of lse in another order: b * p.num_heads_q + query_head(r)) * seqlen_q
=> b * p.num_heads_q + h_kv + r % group * p.num_heads_kv) * seqlen_q
mask judged by the last row: if (head.visible_keys(r0) >= n0 + keys) => if (head.visible_keys(r0 + rows - 1) >= n0 + keys)
mask forgets the key block: head.visible_keys(r0 + i) - n0 => head.visible_keys(r0 + i)
last query block: ceil_div(p.seqlen_q * group_size(p), kBlockQ<Compute<S>>)
=> (p.seqlen_q * group_size(p) / kBlockQ<Compute<S>>)
strip sees what its first row sees: seen[min(j + strips.width, rows) - 1] => seen[j]
strips of all lanes end early: j < lanes; j += width) f(j, min(j + width, lanes) => j < lanes - width; j += width) f(j, min(j + width, lanes)
keys of a strip begin late: f(k, end, j); => f(k + 1, end, j);
# csrc/cpu/operand.h
halves of a pair swapped: low >> 16 | (high & 0xffff0000) => high >> 16 | (low & 0xffff0000)
last of an odd number of rows: i + 1 < rows ? load => i + 2 < rows ? load
padding of odd columns: buffer.from(i).data[terms<S>(cols) - 1] = 0; =>
rows read in place in spite of odd columns: rows.row % 2 == 0 && cols % 2 == 0 => rows.row % 2 == 0
odd strides read in place: rows.row % 2 == 0 && cols % 2 == 0 => cols % 2 == 0
second key of a pair: k + 1 < keys ? load => k + 2 < keys ? load
terms rounded down: kPairs<S> ? ceil_div(n, 2) : n => kPairs<S> ? n / 2 : n
# csrc/cpu/gemm.h
both of a pair seen: (seen(i, j, 2 * k + 1) & ~0xffff) => (seen(i, j, 2 * k) & ~0xffff)
output not rescaled: decay ? fma(load(c), load(decay + j), product) : load(c) + product => load(c) + product
last row of a panel: i + kM <= rows => i + kM < rows
only the last block of a score: C, {k > 0}); => C, {false});
last column of a score: (k += kScoreBlock<E>) < inner => (k += kScoreBlock<E>) < inner - 1
unseen terms enter: sum = seen(i, j, k) ? term : sum; => sum = term;
# csrc/cpu/softmax.h
unseen scores enter the row maximum: if constexpr (kMasked) s = static_cast<T>(k) < limit[v] ? s : set1(kNegInf<T>); =>
unseen weights in forward: if constexpr (kMasked) p = static_cast<T>(k) < limit[v] ? p : vec<T>{}; =>
one weight too many in forward: static_cast<T>(k) < limit[v] ? p => static_cast<T>(k) <= limit[v] ? p
-inf - -inf: return x == kNegInf<T> ? vec<T>{} : x; => return x;
row sum not rescaled: fma(load(state.row_sum + j), decay, sum[v]) => load(state.row_sum + j) + sum[v]
weights in 16 bits: sum[v] += p;
=> p = bit_cast<T>(bit_cast<typename Exp2<T>::bits>(p) & ~typename Exp2<T>::bits(0xffff)), sum[v] += p;
power of two above 1: exponent > 1 ? 0 : exponent - 1 => exponent - 1
sign of the scale not in Q: __builtin_copysign(__builtin_ldexp(1.0, exponent > 1 ? 0 : exponent - 1), softmax_scale)
=> __builtin_ldexp(1.0, exponent > 1 ? 0 : exponent - 1)
no delta: load(ds) - load(delta + j) + load(dlse + j) => load(ds) + load(dlse + j)
dlse lost: load(ds) - load(delta + j) + load(dlse + j) => load(ds) - load(delta + j)
unseen terms of delta: sum = static_cast<T>(k) < load(seen + j) ? more : sum; => sum = more;
unseen dS: p = sees ? p : vec<T>{}, d = sees ? d : vec<T>{}; => p = sees ? p : vec<T>{};
unseen weights in backward: p = sees ? p : vec<T>{}, d = sees ? d : vec<T>{}; => d = sees ? d : vec<T>{};
# csrc/cpu/forward.h
keys of the first row for the block: k_end = head.visible_keys(r0 + rows - 1) => k_end = head.visible_keys(r0)
first key block added to what was there: update{n0 > 0, state.decay} => update{true, state.decay}
block that sees nothing not zeroed: if (k_end == 0) => if (k_end < 0)
finite check of V: strips.masked && !all_finite<S>(keys, p.head_dim_v, => false && !all_finite<S>(keys, p.head_dim_v,
row that sees nothing divided: i < rows && head.visible_keys(r0 + i) ? => i < rows ?
row_max and row_sum swapped: row_max[at] = state.row_max[i], row_sum[at] = state.row_sum[i]
=> row_max[at] = state.row_sum[i], row_sum[at] = state.row_max[i]
sum of float64 in float32: ? 1 / state.row_sum[i] : => ? 1 / static_cast<float>(state.row_sum[i]) :
# csrc/cpu/tile.h
first vector of row sums for all: * load(scale + i) => * load(scale)
tail columns of packed rows: if (d < cols) store(to + d, load(from + d, cols - d)); =>
tail columns of dq, dk not scaled: store(to + d, load(from + d) * scale, cols - d)
=> store(to + d, load(from + d), cols - d)
finite check without tail columns: if (d < cols) sum += load(from + d, cols - d) * T(0); =>
finite check without the last row: bool all_finite(int64_t rows, int64_t cols, Row row) {
=> bool all_finite(int64_t rows, int64_t cols, Row row) { --rows;
# csrc/cpu/backward.h
keys after the last visible one not written: s == splits ? head.seqlen_k : min(j, head.seqlen_k)
=> min(j, head.seqlen_k)
key splits begin late: before * splits < total * s; => before * splits <= total * s;
rows of grouped heads read in place: return group == 1 && in_place<S>(cols, true); => return in_place<S>(cols, true);
dQ part of the first super-block for all: dq_part + r0 * s.ld_k => dq_part
dQ not zeroed: fill_zero(dQ.data, rows * s.ld_k); =>
super-block sees what its first row sees: min(k_end, head.visible_keys(r0 + rows - 1))
=> min(k_end, head.visible_keys(r0))
packing begins inside a block: max(r0, head.first_row(k_begin) / kBlockQ<T> * kBlockQ<T>)
=> max(r0, head.first_row(k_begin))
first block of a key block rounded up: max(0, head.first_row(n0) - r0) / kBlockQ<T> * kBlockQ<T>
=> round_up(max(0, head.first_row(n0) - r0), kBlockQ<T>)
dO blocks as far apart as those of Q: transposed_block(s.dOt, p.head_dim_v, i), s.dP
=> transposed_block(s.dOt, p.head_dim, i), s.dP
delta in one chain: min(d + kScoreBlock<E>, cols) => cols
delta of one block for two: p.seqlen_k <= kBackwardBlockK; } => p.seqlen_k <= 2 * kBackwardBlockK; }
delta not zeroed: fill_zero(s.delta + i, lanes); =>
finite check of K: all_finite<S>(keys, p.head_dim, k_row) && => 
finite check of Q: all_finite<S>(m, p.head_dim, q_row) => true
finite check of dO: all_finite<S>(m, p.head_dim_v, do_row) => true
one pair too many: < set1(s.seen[r]) => <= set1(s.seen[r])
last part of dQ: split = 1; split < splits => split = 1; split < splits - 1
parts of the first head: item / blocks * splits * head.count => item / blocks * head.count
dropout of P lost in dV: if (p.dropout.threshold) multiply_tile => if (false) multiply_tile
dropout of dP lost: store(dp, load(dp) * factor); =>
# csrc/cpu/dropout.h
draws of the first keys for all: (n0 + k) / kDrawKeys => k / kDrawKeys
dropped for kept: >= threshold ? scale => < threshold ? scale
dropped at the threshold: >= threshold ? scale => > threshold ? scale
not scaled up: 65536.0 / (65536 - p.dropout.threshold) => 1.0
halves swapped: i % 2 ? word >> 16 : word & 0xffff => i % 2 ? word & 0xffff : word >> 16
one round too few: i < 10; ++i, key0 => i < 9; ++i, key0
upper half of the seed: static_cast<uint32_t>(seed >> 32) => 0
head without its batch: head.b * p.num_heads_q + head.query_head(r) => head.query_head(r)
# csrc/cpu/simd/math.h
exp2 without its end: x < C::kSmallest ? vec<T>{} : y * power => y * power
exp2 of NaN is 0: x < C::kSmallest ? vec<T>{} : y * power => x >= C::kSmallest ? y * power : vec<T>{}
digit of a coefficient: 0.055508915f => 0.055508615f
# csrc/cpu/simd/half.h
bf16 ties: + 0x7fff + ((bits >> 16) & 1) => + 0x8000
f16 ties: + 0x0fff + ((magnitude >> 13) & 1) => + 0x1000
f16 subnormal: magnitude < 0x38800000 ? subnormal : normal => normal
f16 overflow: magnitude >= 0x477ff000 => magnitude >= 0x7f800000
f16 NaN: half = magnitude > 0x7f800000 ? set1<uint32_t>(0x7e00) : half; =>
# csrc/ops.cpp
order of result strides: strides[order[j]] <= strides[order[at]] => strides[order[j]] >= strides[order[at]]
strides of expanded dimensions: if (strides[order[at]] == 0 || strides[order[j]] == 0) continue; =>
columns taken for contiguous: t.stride(3) == 1 => t.stride(3) != 0
dlse not contiguous: dlse_ = contiguous(dlse) => dlse_ = dlse
offsets of forward not contiguous: const optional<Tensor> offsets = contiguous(q_offsets);
=> const optional<Tensor> offsets = q_offsets;
default offset: : p.seqlen_k - p.seqlen_q; => : 0;
one thread: work < kWorthThreads || forked => true
threads after fork: work < kWorthThreads || forked => work < kWorthThreads
"""


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    new: str


NOTHING = Fault("nothing", "csrc/ops.cpp", "#include <pthread.h>", "#include <pthread.h>")
QUICK_BUILD = Fault("quick build", "CMakeLists.txt", " -O3 ", " -O1 ")


def parse(text: str) -> list[Fault]:
    faults, file = [], ""
    for header, name, old, new in re.findall(r"^# (.+)$|^([^:\n]+): (.+)\s=> ?(.*)$", text, re.MULTILINE):
        file = header or file
        if not header:
            faults.append(Fault(name, file, old, new))
    return faults


def replaced(folder: Path, fault: Fault) -> str:
    text = (folder / fault.file).read_text()
    if text.count(fault.old) != 1:
        sys.exit(f"{fault.name}: {text.count(fault.old)} times and not once in {fault.file}: {fault.old}")
    return text.replace(fault.old, fault.new)


def environment(copy: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(copy), "PYATTN_ISA": ""}


def prepare(copy: Path, isas: list[str]) -> None:
    """Copies what git tracks and builds it, quickly: the source alone decides the bits, so -O1 will do."""
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
        if name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / "sitecustomize.py").write_text(SITE)
    text = replaced(copy, QUICK_BUILD)
    if isas:
        text = re.sub(r"foreach\(isa .*\)", f"foreach(isa {' '.join(isas)})", text)
        table = copy / "csrc" / "cpu" / "dispatch.cpp"
        table.write_text(re.sub(rf'^ +\{{"(?!{"|".join(isas)}).*\n', "", table.read_text(), flags=re.MULTILINE))
    (copy / QUICK_BUILD.file).write_text(text)
    version = re.findall(r'__version__ = "(.*)"', (copy / "pyattn" / "__init__.py").read_text())[0]
    options = {"CMAKE_BUILD_TYPE": "Release", "PYATTN_WERROR": "OFF", "SKBUILD_PROJECT_VERSION": version}
    options |= {"Python_EXECUTABLE": sys.executable, "pybind11_DIR": pybind11.get_cmake_dir()}
    options |= {"CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(copy / "pyattn")}
    command = ["cmake", "-S", ".", "-B", "build", "-G", "Ninja", *(f"-D{name}={x}" for name, x in options.items())]
    subprocess.run(command, cwd=copy, env=environment(copy), check=True, stdout=subprocess.DEVNULL)
    shutil.copy2(copy / "build" / "_build.py", copy / "pyattn")


def caught_by(copy: Path) -> str | None:
    """Builds the copy and runs the suite in it: the first test that fails, or None."""
    options: dict[str, Any] = {"cwd": copy, "env": environment(copy), "capture_output": True, "text": True}
    build = subprocess.run(["cmake", "--build", "build"], check=False, **options)
    if build.returncode:
        sys.exit(f"does not compile:\n{build.stdout[-3000:]}")
    tests = [f"tests/test_{name}.py" for name in TESTS]
    command = [sys.executable, "-c", RUN, str(copy), "-x", "-v", "--tb=no", "-p", "no:cacheprovider", *tests]
    try:
        result = subprocess.run(command, check=False, timeout=TIMEOUT, **options)
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT} s"
    if result.returncode == 0:
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    last = re.findall(r"^tests/\S+", result.stdout, re.MULTILINE)
    if not last:
        sys.exit(f"the suite does not start:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return failed[0] if failed else f"exit status {result.returncode} in {last[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="plant only this fault; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--jobs", type=int, default=2, help="copies that work side by side (2)")
    parser.add_argument("--isa", action="append", help="build only those that are named; scalar must be")
    arguments = parser.parse_args()
    faults = parse(FAULTS)
    for fault in (NOTHING, QUICK_BUILD, *faults):
        replaced(ROOT, fault)
    if arguments.only:
        if unknown := set(arguments.only) - {fault.name for fault in faults}:
            parser.error(f"no such fault: {', '.join(sorted(unknown))}")
        faults = [fault for fault in faults if fault.name in arguments.only]
    if arguments.list:
        print("\n".join(f"{fault.file}: {fault.name}" for fault in faults))
        return
    copies: queue.Queue[Path] = queue.Queue()

    def plant(fault: Fault) -> str | None:
        begin, copy = time.monotonic(), copies.get()
        path, before = copy / fault.file, (copy / fault.file).read_text()
        try:
            path.write_text(replaced(copy, fault))
            by = caught_by(copy)
        finally:
            path.write_text(before)
            copies.put(copy)
        print(f"{time.monotonic() - begin:4.0f} s  {fault.name}: {by or 'NOT CAUGHT'}", flush=True)
        return by

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for n in range(arguments.jobs):
            prepare(copy := Path(folder, str(n)), arguments.isa)
            copies.put(copy)
        without, *results = pool.map(plant, (NOTHING, *faults))
    if without:
        sys.exit(f"without a fault the suite fails too: {without}")
    missed = [fault.name for fault, by in zip(faults, results, strict=True) if not by]
    print(f"{len(faults) - len(missed)} of {len(faults)} caught", *missed, sep="\n  ")
    sys.exit(len(missed) > (1 - WANTED) * len(faults))


if __name__ == "__main__":
    main()
