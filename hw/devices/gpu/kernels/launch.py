"""Launch parameters of the kernels: tile sizes, warps and stages, by architecture and type.

They come from arithmetic, not from a search on each card: a program of a one-row kernel loads 4 to
16 KiB at a time, there are programs for every multiprocessor of the card, and what a program of a
many-row kernel keeps fits in registers (``make kernels-report`` shows that nothing spills).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from crisp.hw.errors import DeviceError

FEW = 16
"""Rows of the smallest tile of a many-row kernel, which is the smallest that tensor cores take."""

SHARED = {80: 163 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes of shared memory that one program may have (CUDA C++ Programming Guide, table of technical
specifications per compute capability)."""


@dataclass(frozen=True)
class Launch:
    """The tile that one program computes at a time, and its threads."""

    rows: int  # of x; 1 in one-row kernels
    neurons: int
    columns: int  # of d_model
    warps: int
    stages: int  # loads in flight


_FRONT_ROW = {
    32: Launch(1, 16, 128, 4, 3),
    16: Launch(1, 16, 256, 4, 3),
    8: Launch(1, 8, 512, 4, 3),
    4: Launch(1, 4, 1024, 4, 3),
}
_BACK_ROW = {  # narrow: d_model over columns is the number of programs
    32: Launch(1, 128, 32, 8, 3),
    16: Launch(1, 256, 32, 8, 3),
    8: Launch(1, 128, 64, 8, 4),
    4: Launch(1, 128, 64, 8, 4),
}
_BACK_ROW_FEW = {  # for cards of at most 16 multiprocessors
    32: Launch(1, 64, 64, 4, 3),
    16: Launch(1, 64, 64, 4, 4),
    8: Launch(1, 64, 64, 4, 4),
    4: Launch(1, 64, 128, 4, 4),
}
_FRONT_FEW = {
    32: Launch(16, 32, 32, 4, 3),
    16: Launch(16, 32, 128, 4, 4),
    8: Launch(16, 32, 128, 4, 4),
    4: Launch(16, 32, 128, 4, 4),
}
_BACK_FEW = {
    32: Launch(16, 32, 32, 4, 3),
    16: Launch(16, 64, 64, 4, 4),
    8: Launch(16, 64, 64, 4, 4),
    4: Launch(16, 64, 64, 4, 4),
}
_MIDDLE = {
    32: Launch(32, 32, 32, 4, 2),
    16: Launch(64, 64, 64, 4, 3),
    8: Launch(64, 64, 64, 8, 3),  # twice the threads, for what is converted takes registers
    4: Launch(64, 64, 64, 4, 3),  # 16 bytes for each thread
}
_LARGE = {
    32: Launch(32, 32, 32, 4, 2),
    16: Launch(128, 64, 64, 8, 3),
    8: Launch(128, 64, 64, 8, 3),
    4: Launch(64, 64, 64, 4, 3),
}

_ONE = {"front_row": _FRONT_ROW, "back_row": _BACK_ROW}
_SOME = {"front_few": _FRONT_FEW, "back_few": _BACK_FEW}
_MANY = {"front_many": _MIDDLE, "back_many": _MIDDLE}
_BIG = {"front_many": _LARGE, "back_many": _LARGE}

TABLE = {
    80: _ONE | _SOME | _BIG,
    87: _ONE | {"back_row": _BACK_ROW_FEW} | _SOME | _MANY,
    89: _ONE | _SOME | _MANY,
    90: _ONE | _SOME | _BIG,
}
"""Launch parameters by architecture, kernel, and bits of a weight; in kernels for many rows,
products in float32 are listed under 32 whatever the weights are."""


def launch(kernel: str, bits: int, operand: int, rows: int, arch: int, shared: int) -> Launch:
    """Return the launch parameters of ``front`` or ``back`` for weights of ``bits`` and rows of x.

    operand: bits of what tensor cores multiply. arch: 10 * major + minor of the compute capability;
    one that is not in the table is taken for the next older one. shared: bytes that a program may
    have; stages are dropped until they fit. Raises DeviceError for a card older than the table.
    """
    listed_arch = max((listed for listed in TABLE if listed <= arch), default=None)
    if listed_arch is None:
        raise DeviceError(f"compute capability {arch / 10:.1f}: expected {min(TABLE) / 10:.1f}")
    if rows == 1:
        parameters = TABLE[listed_arch][f"{kernel}_row"][bits]
    else:
        size = "few" if rows <= FEW else "many"
        parameters = TABLE[listed_arch][f"{kernel}_{size}"][32 if operand == 32 else bits]
    while parameters.stages > 1 and shared_bytes(parameters, kernel, bits, operand) > shared:
        parameters = replace(parameters, stages=parameters.stages - 1)
    return parameters


def shared_bytes(launch: Launch, kernel: str, bits: int, operand: int) -> int:
    """Return the most shared memory that a program takes, in bytes: the loads of all stages, and
    converted weights.
    """
    weights = launch.neurons * launch.columns * (2 if kernel == "front" else 1)
    along = launch.columns if kernel == "front" else launch.neurons
    kept = operand if launch.rows > 1 else 32
    converted = weights * operand if launch.rows > 1 and bits != operand else 0
    return (launch.stages * (weights * bits + launch.rows * along * kept) + converted) // 8
