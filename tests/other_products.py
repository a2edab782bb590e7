"""A stand-in for other processors: torch's matrix products on the CPU, summed in another order.

    pytest -p tests.other_products --products=KIND

once: numbers of half precision are summed in float32 and rounded once, as AVX512_BF16 and AMX do.
often: partial sums of 64 products are rounded to the type of the numbers, as where a library adds
up the result in its own memory.
In both, float32 and float64 are summed in an order of their own, which depends on the shape, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

KINDS = ("once", "often")
OFTEN = 64  # products between two roundings
_LIBRARY: list[Any] = []  # what is put in place is taken away when it is forgotten


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--products", choices=KINDS, default=KINDS[0], help="how they are rounded")


def pytest_configure(config: pytest.Config) -> None:
    put_in_place(config.getoption("--products"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch's products: a stand-in, rounded {config.getoption('--products')}"


def put_in_place(kind: str) -> None:
    import torch

    def product(a: Any, b: Any) -> Any:
        """a [..., n, k] times b [..., k, m]."""
        half = a.dtype in (torch.bfloat16, torch.float16)
        x, y = (one.detach().float() if half else one.detach() for one in (a, b))
        if x.dtype.is_complex or not x.dtype.is_floating_point:
            return torch.from_numpy(x.numpy() @ y.numpy())
        # from the last products to the first, in pieces of another size for every number of rows
        k = x.shape[-1]
        each = OFTEN if half else 8 + x.shape[-2] % 8
        out = torch.zeros((*x.shape[:-1], y.shape[-1]), dtype=x.dtype)
        for last in range(k, 0, -each):
            part = slice(max(0, last - each), last)
            out += torch.from_numpy(np.matmul(x[..., part].numpy(), y[..., part, :].numpy()))
            if half and kind == "often":
                out = out.to(a.dtype).float()
        return out.to(a.dtype)

    def added(bias: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
        out = product(a, b)
        out = out if alpha == 1 else out * alpha
        return out if beta == 0 else out + (bias if beta == 1 else bias * beta)

    def by_vector(a: Any, x: Any) -> Any:
        return product(a, x[:, None])[:, 0]

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", product, "CPU")
    library.impl("bmm", product, "CPU")
    library.impl("mv", by_vector, "CPU")
    library.impl("addmm", added, "CPU")
    library.impl("baddbmm", added, "CPU")
    _LIBRARY.append(library)
    # attention in one piece multiplies by itself
    torch.backends.cuda.enable_flash_sdp(False)
