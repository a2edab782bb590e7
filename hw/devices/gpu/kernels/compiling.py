"""Kernels compiled for GPUs that are not here, and what their machine code is like.

Triton and the ptxas that it brings need no driver and no GPU for that. What can be seen: whether
registers suffice, whether the shared memory is there, whether weights are fetched 16 bytes at a
time, and whether products are left to the tensor cores. Not what is right, nor how fast it is.
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
    from crisp.hw.devices.gpu.kernels.forms import Form

WEIGHTS = "numbers"  # the argument from which a kernel takes them
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
    """What one form became on one architecture. Counts are of instructions, as they are written:
    one in a loop is one.
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
    mma: bool  # whether there must be such

    def counted(self, argument: str = "") -> tuple[int, int]:
        """Loads of 16 bytes, and all loads; of those that may be from an argument, if one is given.

        What is known to be from nowhere may be from anywhere.
        """
        asked = [(size, n) for name, size, n in self.loads if not name or argument in name]
        return sum(n for size, n in asked if size == WIDEST), sum(n for _, n in asked)

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
        wide, every = self.counted(WEIGHTS)
        if wide < every or not every:
            found.append(f"loads weights {wide} of {every} times by {WIDEST} bytes")
        if self.mma and not self.matrix:
            found.append("leaves nothing to the tensor cores")
        for name, _ in self.matrix:
            if not _EXACT.search(name):
                found.append(f"multiplies by {name}, which is not of halves with sums in float32")
        return tuple(found)


def report(form: Form, arch: int) -> Report:
    """Compile a form as it would be launched on an architecture, in some seconds.

    Raises CrispError where Triton interprets kernels, so that there is nothing to compile.
    """
    made, said = _compiled(form, arch)
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
    """How many loads from the GPU's memory there are, by argument and by the bytes that each gives
    a thread.

    arguments: of the kernel, in order. What an address was computed from tells which one it is
    behind; numbers that were loaded are no part of that.
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


def _compiled(form: Form, arch: int) -> tuple[Any, str]:
    """What Triton makes of it, and what ptxas says meanwhile: spills are told nowhere else."""
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
        knobs.compilation.always_compile = True  # what is in Triton's cache says nothing
        knobs.nvidia.dump_ptxas_log = True
        made = triton.compile(source, target=target, options=options)
    return made, said.getvalue()
