"""GPUs as torch sees them."""

from __future__ import annotations

from typing import Any

from crisp import extras
from crisp.cli.output.findings import Finding
from crisp.errors import CrispError
from crisp.units import format_bytes


def gpus() -> list[Finding]:
    """A finding for each GPU; one that is not ok if there are none."""
    try:
        torch = extras.import_extra("torch")
    except (CrispError, OSError) as error:
        why = f"torch cannot be imported: {error}"
        return [Finding("gpu", False, why, "install it anew; pytorch.org says how")]
    build = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        remedy = "where there is an NVIDIA GPU: a build for CUDA; pytorch.org says how"
        return [Finding("gpu", False, f"{build} is built without CUDA", remedy)]
    if not torch.cuda.is_available():
        why = f"{build}, for CUDA {torch.version.cuda}, sees none"
        remedy = "nvidia-smi says whether the driver sees one; a container must be given it"
        return [Finding("gpu", False, why, remedy)]
    return [_gpu(torch, number, build) for number in range(torch.cuda.device_count())]


def _gpu(torch: Any, number: int, build: str) -> Finding:
    own = torch.cuda.get_device_properties(number)
    capability = f"{own.major}.{own.minor}"
    shared = bool(getattr(own, "is_integrated", False))
    where = "shared with the processor" if shared else "its own"
    return Finding(
        f"gpu {number}",
        True,
        f"{own.name}, {format_bytes(own.total_memory)} of memory, {where}; compute capability "
        f"{capability}, {own.multi_processor_count} multiprocessors; {build}, for CUDA "
        f"{torch.version.cuda}",
        values={
            "name": own.name,
            "uuid": str(own.uuid) if hasattr(own, "uuid") else None,  # torch 2.6 may lack it
            "memory_bytes": own.total_memory,
            "capability": capability,
            "integrated": shared,
        },
    )
