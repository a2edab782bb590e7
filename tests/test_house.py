"""The layout that `ls` shows: small folders, one meaning for each public name, one way in."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST, LEAST = 14, 2  # modules in a folder
FOLDERS = [name for name in ("crisp", "sim", "hw") if (ROOT / name).is_dir()]
MODULES = sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))


def test_sim_and_hw_are_the_folders_beside_crisp() -> None:
    """So the checkout, an editable install and a wheel share one import."""
    if not (ROOT / "sim").exists():
        pytest.skip("an unpacked source distribution has them as folders inside crisp")
    for name in ("sim", "hw"):
        link = ROOT / "crisp" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


def test_folders_are_small() -> None:
    folders = Counter(path.parent for path in MODULES)
    parents = {folder.parent for folder in folders}
    assert len(folders) > 30
    assert not {folder: n for folder, n in folders.items() if n > MOST}
    # A folder of one module is that module, unless it holds further folders.
    assert not {folder for folder, n in folders.items() if n < LEAST and folder not in parents}


def test_a_public_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_modules_are_of_a_size_to_be_read_at_once() -> None:
    long = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert not {path: lines for path, lines in long.items() if lines > 350}
