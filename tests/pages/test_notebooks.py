"""Every notebook runs in a fresh kernel, in any folder, and gives the outputs that it is kept with.

Cells whose outputs are of the machine are tagged ``varies``: they run, and are kept without any.
All others are written anew by

    python tests/pages/test_notebooks.py
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
VARIES = "varies"
PICTURE = "image/png"
TOO_LARGE = 80_000  # bytes of a picture
NEEDS = {"simulated-against-measured": ("torch", "xxhash")}  # beyond the base installation


def execute(notebook: Any, scratch: Path) -> None:
    """Run all cells, in a kernel of this Python that knows no display and no user's settings.

    scratch: an empty folder; what the notebook leaves is in its ``work`` and ``temporary``.
    """
    for name in ("work", "temporary"):
        (scratch / name).mkdir()
    inherited = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    environment = inherited | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "IPYTHONDIR": str(scratch / "ipython"),
        "TMPDIR": str(scratch / "temporary"),
        "OMP_NUM_THREADS": "1",
    }
    # sockets in the scratch folder, not ports that somebody else may take meanwhile
    sockets = {"transport": "ipc", "connection_file": str(scratch / "kernel.json")}
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        config=Config(KernelManager=sockets),
        timeout=300,
        startup_timeout=120,
        record_timing=False,
        resources={"metadata": {"path": str(scratch / "work")}},
    )
    client.execute(env=environment)


def outputs(cell: Any) -> list[Any]:
    """What can be compared of a cell's outputs; of a picture, that there is one."""
    contents = []
    for output in cell.outputs:
        data = dict(output.get("data", {}))
        if PICTURE in data:
            data[PICTURE] = "a picture"
        contents.append((output.output_type, output.get("name"), output.get("text"), data))
    return contents


def varies(cell: Any) -> bool:
    return VARIES in cell.metadata.get("tags", [])


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_gives_what_it_shows(path: Path) -> None:
    for module in NEEDS.get(path.stem, ()):
        pytest.importorskip(module)
    shown, run = (nbformat.read(path, as_version=4) for _ in range(2))
    with TemporaryDirectory() as folder:
        execute(run, Path(folder))
        left_behind = [*Path(folder, "work").iterdir(), *Path(folder, "temporary").iterdir()]
    assert not left_behind, "files were left behind"
    for kept, fresh in zip(code_cells(shown), code_cells(run), strict=True):
        assert not any(output.get("name") == "stderr" for output in fresh.outputs), fresh.source
        if not varies(kept):
            assert outputs(kept) == outputs(fresh), (
                f"{path.name} shows something else than {kept.source}\nmakes now; "
                "python tests/pages/test_notebooks.py writes it anew"
            )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_is_small_and_of_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 13
    assert "base install" in notebook.cells[0].source or "torch" in notebook.cells[0].source
    for cell in code_cells(notebook):
        assert not (varies(cell) and cell.outputs)
        for output in cell.outputs:
            picture = base64.b64decode(output.get("data", {}).get(PICTURE, ""))
            assert not picture or (picture[1:4] == b"PNG" and len(picture) < TOO_LARGE)
    text = re.sub(rf'"{PICTURE}": "[^"]*"', "", path.read_text(encoding="utf-8"))
    assert not re.search(r"/(home|root|tmp|var|work|usr|opt|Users)/", text)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / link).exists(), link


def write(path: Path) -> None:
    """Run a notebook and keep what it gives, but for what varies."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    for number, cell in enumerate(code_cells(notebook), 1):
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
        if varies(cell):
            cell.outputs, cell.execution_count = [], None
    notebook.metadata["language_info"] = {"name": "python"}  # no version of this Python
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in NOTEBOOKS:
        write(path)
