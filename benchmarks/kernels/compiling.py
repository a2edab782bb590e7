"""Compile kernels for GPUs that are not here, and inspect their machine code.

Triton and the ptxas that it brings need no driver and no GPU for that. The machine code shows
whether registers and shared memory suffice, whether weights are loaded 16 bytes at a time, and
whether products are left to the tensor cores. It shows neither whether results are right nor how
fast they are computed.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crisp.errors import CrispError
from crisp.hw.devices.gpu.kernels.launch import SHARED

if TYPE_CHECKING:
    from benchmarks.kernels.forms import Form

WEIGHTS = "numbers"  # the argument from which a kernel loads them
WIDEST = 16  # bytes that one thread loads at once

_ROOT = re.compile(r"ld\.param\.[bu]64\s+(%\w+), \[\w+_param_(\d+)\]")
# ld.global.L1::evict_last.v4.b32 {...}, [ %rd1 + 0 ]
_LOAD = re.compile(
    r"\bld(?:\.[\w:]+)*?\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfsu](\d+)\s[^[]*\[\s*(%\w+)"
)
# cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10
_COPY = re.compile(
    r"\bcp\.async\.c[ag]\.shared[\w.:]*\s+\[[^]]*\],\s*\[\s*(%\w+)[^]]*\],\s*(0x\w+|\d+)"
)
_MADE = re.compile(r"^\s*(?:@!?%\w+\s+)?(?!ld|st|cp|//)[\w.:]+\s+(%\w+),(.*);", re.MULTILINE)
_MATRIX = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async)\.[\w.]+")
_EXACT = re.compile(r"\.f32\.(f16|bf16)\.\1(\.f32)?$")  # halves, whose sums are in float32

_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Report:
    """One form as compiled for one architecture.

    Counts are of instructions as they are written: one in a loop counts once.
    """

    form: str
    arch: int  # 87 is sm_87
    registers: int  # of a thread
    stack: int  # bytes of a thread, in the GPU's main memory
    spill_stores: int  # bytes that went there for want of registers
    spill_loads: int
    shared: int  # bytes of a block of threads
    loads: tuple[tuple[str, int, int], ...]  # of the GPU's memory: argument, bytes, how many
    matrix: tuple[tuple[str, int], ...]  # products by the tensor cores: how many of each kind
    mma: bool  # whether there must be such products

    def count_loads(self, argument: str = "") -> tuple[int, int]:
        """Return the number of loads of 16 bytes, and of all loads.

        argument: count only loads that may be from it; one of unknown origin may be.
        """
        loads = [(size, n) for name, size, n in self.loads if not name or argument in name]
        return sum(n for size, n in loads if size == WIDEST), sum(n for _, n in loads)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is not as it must be, in words."""
        found = []
        if self.spill_stores or self.spill_loads:
            found.append(f"spills {self.spill_stores} bytes, loads {self.spill_loads} back")
        elif self.stack:
            found.append(f"keeps {self.stack} bytes of a thread in memory")
        if self.shared > SHARED[self.arch]:
            found.append(f"takes {self.shared:,} bytes of shared memory, of {SHARED[self.arch]:,}")
        wide, every = self.count_loads(WEIGHTS)
        if wide < every or not every:
            found.append(f"loads weights {wide} of {every} times by {WIDEST} bytes")
        if self.mma and not self.matrix:
            found.append("leaves nothing to the tensor cores")
        for name, _ in self.matrix:
            if not _EXACT.search(name):
                found.append(f"multiplies by {name}, which is not of halves with sums in float32")
        return tuple(found)


def report_named(arch: int, name: str) -> Report:
    """Compile the form of a name; for other processes, to which kernels cannot be sent."""
    from benchmarks.kernels.forms import forms  # needs triton

    (form,) = (form for form in forms(arch) if form.name == name)
    return report(form, arch)


def report(form: Form, arch: int) -> Report:
    """Compile a form as it would be launched on an architecture; this takes some seconds.

    Raises CrispError where Triton interprets kernels, so that there is nothing to compile.
    """
    made, said = _compile(form, arch)
    ptx = made.asm["ptx"]
    memory = zip(*_MEMORY.findall(said), strict=True)  # of the kernel, and of what it calls
    stack, stores, back = (sum(map(int, numbers)) for numbers in memory)
    return Report(
        form=form.name,
        arch=arch,
        registers=max(map(int, _REGISTERS.findall(said))),
        stack=stack,
        spill_stores=stores,
        spill_loads=back,
        shared=made.metadata.shared,
        loads=loads(ptx, [name for name in form.fn.arg_names if name not in form.constexprs]),
        matrix=tuple(sorted(Counter(_MATRIX.findall(ptx)).items())),
        mma=form.mma,
    )


def loads(ptx: str, arguments: list[str]) -> tuple[tuple[str, int, int], ...]:
    """Count the loads from the GPU's memory: (argument, bytes for a thread, how many) of each kind.

    arguments: the kernel's, in order. The argument that a load is from follows from what its
    address was computed from; numbers that were loaded are no part of that.
    """
    origins: dict[str, set[str]] = {}
    for register, number in _ROOT.findall(ptx):
        if int(number) < len(arguments):  # the rest are Triton's own
            origins.setdefault(register, set()).add(arguments[int(number)])
    made = [(to, re.findall(r"%\w+", given)) for to, given in _MADE.findall(ptx)]
    before = -1
    while before != (before := sum(map(len, origins.values()))):
        for to, given in made:
            if known := set().union(*(origins.get(one, ()) for one in given)):
                origins.setdefault(to, set()).update(known)
    found: Counter[tuple[str, int]] = Counter()
    for n, bits, address in _LOAD.findall(ptx):
        found["+".join(sorted(origins.get(address, ()))), int(n or 1) * int(bits) // 8] += 1
    for address, size in _COPY.findall(ptx):
        found["+".join(sorted(origins.get(address, ()))), int(size, 0)] += 1
    return tuple((name, size, n) for (name, size), n in sorted(found.items()))


def _compile(form: Form, arch: int) -> tuple[Any, str]:
    """Return Triton's compiled kernel and ptxas's log, which alone tells of spilled registers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(form.fn, triton.runtime.JITFunction):
        raise CrispError("TRITON_INTERPRET is set: kernels are compiled only where it is not")
    names = form.fn.arg_names
    source = ASTSource(
        fn=form.fn,
        signature={n: "constexpr" if n in form.constexprs else form.signature[n] for n in names},
        constexprs=form.constexprs,
        # A launch finds by itself which pointers and numbers are multiples of 16.
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in form.aligned},
    )
    options = {"num_warps": form.num_warps, "num_stages": form.num_stages}
    target, knobs, said = GPUTarget("cuda", arch, 32), triton.knobs, io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(said):
        knobs.compilation.always_compile = True  # there is no log of what comes from the cache
        knobs.nvidia.dump_ptxas_log = True
        made = triton.compile(source, target=target, options=options)
    return made, said.getvalue()
