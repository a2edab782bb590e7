"""GPUs as torch sees them."""

from __future__ import annotations

from typing import Any

from crisp import extras
from crisp.cli.output.diagnoses import Diagnosis
from crisp.errors import CrispError
from crisp.units import format_bytes


def gpus() -> list[Diagnosis]:
    """Return a diagnosis for each GPU; one that is not ok if there are none."""
    try:
        torch = extras.import_extra("torch")
    except (CrispError, OSError) as error:
        why = f"torch cannot be imported: {error}"
        return [Diagnosis("gpu", False, why, "install it anew; pytorch.org says how")]
    build = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        remedy = "where there is an NVIDIA GPU: a build for CUDA; pytorch.org says how"
        return [Diagnosis("gpu", False, f"{build} is built without CUDA", remedy)]
    if not torch.cuda.is_available():
        why = f"{build}, for CUDA {torch.version.cuda}, sees none"
        remedy = "nvidia-smi says whether the driver sees one; a container must be given it"
        return [Diagnosis("gpu", False, why, remedy)]
    return [_gpu(torch, number, build) for number in range(torch.cuda.device_count())]


def _gpu(torch: Any, number: int, build: str) -> Diagnosis:
    properties = torch.cuda.get_device_properties(number)
    capability = f"{properties.major}.{properties.minor}"
    uuid = str(properties.uuid) if hasattr(properties, "uuid") else None  # torch 2.6 may lack it
    shared = bool(getattr(properties, "is_integrated", False))
    where = "shared with the processor" if shared else "its own"
    return Diagnosis(
        f"gpu {number}",
        True,
        f"{properties.name}, {format_bytes(properties.total_memory)} of memory, {where}; compute "
        f"capability {capability}, {properties.multi_processor_count} multiprocessors; {build}, "
        f"for CUDA {torch.version.cuda}",
        values={
            "name": properties.name,
            "uuid": uuid,
            "memory_bytes": properties.total_memory,
            "capability": capability,
            "integrated": shared,
        },
    )
