"""The tests as other processors, thread counts and settings would run them: `make matrix`.

    python tests/matrix.py [--rows REGEX] [--files REGEX] [argument of pytest ...]

A row for each way to run them, with what passed and failed; exit code 1 if anything failed. Tests
with real arithmetic are those in files that name torch or numba; settings are tried with all tests.
Whatever is slow is left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)

# (what a row is called, environment, arguments of pytest)
Row = tuple[str, dict[str, str], tuple[str, ...]]
TORCH = {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
NUMPY = {
    "NPY_DISABLE_CPU_FEATURES": " ".join(
        name for name in __cpu_dispatch__ if __cpu_features__[name]
    ),
    "OPENBLAS_CORETYPE": "Prescott",
}
TWO = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}
STAND_IN = ("-p", "tests.other_products", "-W", "ignore:Warning only once for all operators")
ARITHMETIC: list[Row] = [
    ("as it is, one thread", {}, ()),
    ("torch's least instructions", TORCH, ()),
    ("torch: only ATen's least", {"ATEN_CPU_CAPABILITY": "default"}, ()),
    ("torch: only oneDNN's least", {"ONEDNN_MAX_CPU_ISA": "SSE41"}, ()),
    ("numpy's least instructions", NUMPY, ()),
    ("numba: a generic processor", {"NUMBA_CPU_NAME": "generic"}, ()),
    ("numba: a processor with AVX2", {"NUMBA_CPU_NAME": "haswell"}, ()),
    ("two threads", {**TWO, "OMP_WAIT_POLICY": "passive"}, ("-n", "1")),
    ("products rounded once", {}, (*STAND_IN, "--products=once")),
    ("products rounded often", {}, (*STAND_IN, "--products=often")),
]
SETTINGS: list[Row] = [
    ("numpy's least instructions", NUMPY, ()),
    ("PYTHONHASHSEED=0", {"PYTHONHASHSEED": "0"}, ()),
    ("PYTHONHASHSEED=1", {"PYTHONHASHSEED": "1"}, ()),
    ("PYTHONHASHSEED=random", {"PYTHONHASHSEED": "random"}, ()),
    ("narrow terminal, far place", {"COLUMNS": "40", "LC_ALL": "C", "TZ": "Asia/Kathmandu"}, ()),
    ("wide terminal, UTF-8", {"COLUMNS": "300", "LC_ALL": "C.UTF-8", "TZ": "UTC"}, ()),
    ("temporary files in memory", {"TMPDIR": "/dev/shm"}, ()),
]


def processor() -> str:
    """Its name, and which of the flags that decide about rounding it has."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    has = set((facts.get("flags") or facts.get("Features", "")).split())
    name = facts.get("model name") or platform.processor() or platform.machine()
    flags = ", ".join(f"{flag} {'yes' if flag in has else 'no'}" for flag in FLAGS[:6])
    more = "".join(f", {flag} yes" for flag in FLAGS[6:] if flag in has)
    return f"{name}, {os.cpu_count()} processors: {flags}{more}"


def files(arithmetic: bool) -> list[str]:
    """The tests with real arithmetic, or all."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        words = path.read_text(encoding="utf-8")
        if not arithmetic or re.search(r"\b(torch|numba)\b", words):
            found.append(str(path.relative_to(ROOT)))
    return found


def run(row: Row, tests: list[str], more: list[str]) -> tuple[dict[str, int], list[str]]:
    """(how many passed, failed and so on; which failed)"""
    _, environment, arguments = row
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile"]
    command += ["-m", "not slow", "-p", "no:cacheprovider", "-rfE", "--tb=no", *arguments, *more]
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*command, *tests], cwd=ROOT, env=kept | environment, capture_output=True, text=True
    )
    lines = done.stdout.splitlines() or [""]
    counts = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])
    }
    if done.returncode and not counts.get("failed"):
        counts["error"] = counts.get("error", 0) or 1
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return counts, [line for line in lines if line.startswith(("FAILED", "ERROR"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only those whose names match")
    parser.add_argument("--files", default="", help="only those tests whose paths match")
    asked, more = parser.parse_known_args()
    print(processor(), flush=True)
    print(f"{'':30}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}")
    wrong = []
    for rows, arithmetic in ((ARITHMETIC, True), (SETTINGS, False)):
        tests = [name for name in files(arithmetic) if re.search(asked.files, name)]
        for row in rows:
            if not re.search(asked.rows, row[0]) or not tests:
                continue
            begin = time.monotonic()
            counts, failed = run(row, tests, more)
            bad = counts.get("failed", 0) + counts.get("error", 0)
            told = counts.get("passed", 0), bad, counts.get("skipped", 0)
            print(f"{row[0]:30}{told[0]:8,}{told[1]:8,}{told[2]:8,}{time.monotonic() - begin:9.0f}")
            print("".join(f"    {line}\n" for line in failed), end="", flush=True)
            wrong += [row[0]] if bad else []
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
