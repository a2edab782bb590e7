"""Kernels compiled for GPUs that are not here: some of each kind, and some that have a fault."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels.compiling import Report, loads

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = 80, 87, 89, 90
SUBSET = (
    "front-row-bf16-bf16-silu", "back-row-bf16-bf16", "front-many-fp16-fp16-gpt_oss",
    "back-many-bf16-bf16", "front-many-int4-bf16-silu", "back-few-int4-bf16",
)  # fmt: skip

_FORMS = """
import dataclasses, json, sys
from benchmarks.kernels.compiling import report
from benchmarks.kernels.forms import forms
for arch in map(int, sys.argv[1].split(",")):
    for form in forms(arch):
        if form.name in sys.argv[2:]:
            print(json.dumps(dataclasses.asdict(report(form, arch))), flush=True)
"""

_NAMES = """
from benchmarks.kernels.forms import forms
from crisp.hw.devices.gpu.kernels.launch import SHARED
print("\\n".join(f"sm_{arch} {form.name}" for arch in SHARED for form in forms(arch)))
"""

_PLANTED = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
from benchmarks.kernels.compiling import report
from planted import FORMS
for form in FORMS:
    print(json.dumps(dataclasses.asdict(report(form, 80))), flush=True)
"""


def run(folder: Path, program: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Code, output and errors of a program in a process that knows nothing of Triton's variables
    but these, and whose cache is empty.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=kept | {"TRITON_CACHE_DIR": str(folder)} | variables,
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def reports(folder: Path, program: str, *arguments: str) -> list[Report]:
    code, out, err = run(folder, program, *arguments)
    assert code == 0, err
    found = []
    for line in out.splitlines():
        fields = json.loads(line)
        pairs = {name: tuple(map(tuple, fields[name])) for name in ("loads", "matrix")}
        found.append(Report(**fields | pairs))
    return found


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    folder = tmp_path_factory.mktemp("triton")
    return {found.form: found for found in reports(folder, _PLANTED, str(Path(__file__).parent))}


def test_some_forms_of_every_kind_are_as_they_must_be(tmp_path: Path) -> None:
    found = reports(tmp_path, _FORMS, ",".join(map(str, ARCHITECTURES)), *SUBSET)
    assert {(one.arch, one.form) for one in found} == {
        (arch, name) for arch in ARCHITECTURES for name in SUBSET
    }
    assert [(one.arch, one.form, one.faults) for one in found if one.faults] == []
    for one in found:
        multiplied = "-row-" not in one.form
        assert one.mma == multiplied == bool(one.matrix), one
        wide, every = one.count_loads("numbers")
        assert wide == every >= 1, one


def test_the_page_has_all_forms_on_all_architectures_as_they_must_be(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, _NAMES)
    assert code == 0, err
    text = (ROOT / "docs/kernels.md").read_text("utf-8").partition("## As compiled\n")[2]
    rows = []
    for part in text.split("\n### ")[1:]:
        arch = part.partition(":")[0]
        lines = [line.split(" | ") for line in part.splitlines()[4:]]
        rows += [(f"{arch} {line[0].removeprefix('| ')}", line[-1]) for line in lines]
    assert [name for name, _ in rows] == out.splitlines()
    assert {faults for _, faults in rows} == {" |"}


@pytest.mark.parametrize("name", ["nothing", "nothing of a product"])
def test_a_kernel_without_faults_has_none(planted: dict[str, Report], name: str) -> None:
    assert planted[name].faults == ()


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("registers", "spills "),
        ("shared memory", "takes 196,608 bytes of shared memory, of 166,912"),
        ("narrow", "loads weights 0 of 8 times by 16 bytes"),
        ("narrow beside wide", "loads weights 0 of "),
        ("no product", "leaves nothing to the tensor cores"),
        ("rounded", "multiplies by mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
        ("half sums", "multiplies by mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"),
    ],
)
def test_a_fault_is_found_and_no_other(planted: dict[str, Report], name: str, start: str) -> None:
    (fault,) = planted[name].faults
    assert fault.startswith(start)


def test_what_is_counted_of_small_kernels(planted: dict[str, Report]) -> None:
    """1024 numbers of 4 bytes by 128 threads: two loads of four numbers each, or eight of one.

    A tile of the product is 64 x 64 numbers of 2 bytes, by 256 threads: two loads of x and two of
    weights. Each is there three times: two before the loop, for its first two rounds, and one in it
    for the second next.
    """
    assert planted["nothing"].loads == (("numbers", 16, 2),)
    assert planted["narrow"].loads == (("numbers", 4, 8),)
    assert planted["nothing of a product"].loads == (("numbers", 16, 6), ("x", 16, 6))
    assert planted["narrow beside wide"].loads == (("numbers", 2, 16), ("x", 16, 6))
    assert planted["nothing"].shared == 0
    assert planted["nothing"].registers < 40 < 255 == planted["registers"].registers


def test_interpreted_kernels_are_refused(tmp_path: Path) -> None:
    asked = _PLANTED, str(Path(__file__).parent)
    code, _, err = run(tmp_path, *asked, TRITON_INTERPRET="1")
    assert code == 1
    assert "CrispError: TRITON_INTERPRET is set" in err


PTX = """
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b32 %r1, [kernel_param_1];
    ld.param.b64 %rd2, [kernel_param_2];
    ld.param.b64 %rd3, [kernel_param_3];
    mul.wide.s32 %rd4, %r1, 4;
$L__BB0_1:
    add.s64 %rd5, %rd1, %rd4;
    // begin inline asm
    @%p1 ld.global.L1::evict_last.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd5 + 0 ];
    // end inline asm
    ld.global.nc.v2.b64 {%rd8, %rd9}, [%rd1+16];
    @%p2 ld.global.b16 { %rs1 }, [ %rd7 + 0 ];
    ld.volatile.global.u32 %r6, [%rd2];
    cp.async.cg.shared.global [ %r7 + 0 ], [ %rd6 + 0 ], 0x10, %r8;
    @%p1 cp.async.ca.shared.global [ %r7 + 0 ], [ %rd6 + 0 ], 0x4, %r8;
    mov.b64 %rd7, %rd6;
    mad.wide.u32 %rd6, %r6, 2, %rd2;
    add.s64 %rd10, %rd3, %rd8;
    ld.global.b8 %rs2, [%rd10];
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r9];
    @%p1 bra $L__BB0_1;
    st.global.v4.b32 [ %rd1 + 0 ], { %r2, %r3, %r4, %r5 };
"""


def test_loads_are_counted_by_argument_and_by_the_bytes_of_a_thread() -> None:
    """Also of addresses that come from further down, from the round before. What was loaded, or is
    an argument of 32 bits, is no part of an address's origin.
    """
    assert loads(PTX, ["a", "n", "b", "c"]) == (
        ("a", 16, 2), ("b", 2, 1), ("b", 4, 2), ("b", 16, 1), ("c", 1, 1)
    )  # fmt: skip
