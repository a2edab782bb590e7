"""What docs/architecture.md names is there: files, functions, packages and layers."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def located(path: str) -> Path:
    """Where a path of the checkout is: sim and hw of a source distribution are in crisp alone."""
    return ROOT / path if (ROOT / path).exists() else ROOT / "crisp" / path


def defined(path: Path) -> set[str]:
    """The names that a module defines, those of a class after its own and a dot."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif hasattr(node, "name"):
            names.add(node.name)
    return names


def test_every_linked_function_is_in_its_file() -> None:
    links = re.findall(r"\[`([\w.]+)(?:\([^`]*\))?`\]\(\.\./([\w/]+\.py)\)", PAGE)
    assert len(links) > 30
    assert len(links) == len(re.findall(r"\]\(\.\./(?!examples)[\w/]+\.py\)", PAGE))
    missing = [(name, path) for name, path in links if name not in defined(located(path))]
    assert not missing


def test_the_tree_has_the_layers_of_the_contract() -> None:
    """In the order of pyproject.toml, and every package once."""
    (tree,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    named = re.findall(r"^([\w/]+)  ", tree, re.MULTILINE)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    place = {name.strip(): at for at, layer in enumerate(layers) for name in layer.split("|")}
    assert sorted(name.removeprefix("crisp/") for name in named) == sorted(place)
    order = [place[name.removeprefix("crisp/")] for name in named]
    assert order == sorted(order)

    packages = {
        file.parent.relative_to(ROOT / "crisp").as_posix()
        for name in ("sim", "hw")
        for file in (ROOT / "crisp" / name).glob("*/__init__.py")
    }
    assert set(re.findall(r"^    ([\w/]+)", tree, re.MULTILINE)) == packages | {"sim/profiles"}


def test_the_guide_for_contributors_names_places_that_are_there() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| a.*\|$", guide, re.MULTILINE):
        paths = re.findall(r"`([\w/]+(?:/|\.py))`", row)
        text = ""
        for path in paths:
            place = next(ROOT.glob(f"**/{path}"), None) if "/" not in path else located(path)
            assert place is not None and place.exists(), row
            text += place.read_text(encoding="utf-8") if place.is_file() else ""
        for name in re.findall(r"`([A-Z]\w+)`", row):
            assert re.search(rf"^(?:class )?{name}\b", text, re.MULTILINE), f"{name}: {row}"


def test_the_public_names_are_those_of_the_packages() -> None:
    rows = re.findall(r"^\| `(crisp[\w.]*)` \| (.*) \|$", PAGE, re.MULTILINE)
    modules = ["crisp", "crisp.capture", "crisp.sim", "crisp.hw", "crisp.plugins"]
    assert [module for module, _ in rows] == modules
    for module, listed in rows:
        assert set(re.findall(r"`(\w+)`", listed)) == set(importlib.import_module(module).__all__)


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
    assert float(capsys.readouterr().out) > 0
