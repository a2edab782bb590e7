"""The public names: all there, all said, and nothing large imported for them beforehand."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import crisp
import crisp.hw
import crisp.sim


@pytest.mark.parametrize("package", [crisp, crisp.sim, crisp.hw], ids=lambda one: one.__name__)
def test_every_public_name_is_there(package: ModuleType) -> None:
    assert package.__all__ == sorted(set(package.__all__))
    for name in package.__all__:
        value = getattr(package, name)
        assert not isinstance(value, ModuleType), name
        assert value is getattr(import_module(value.__module__), value.__name__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize("package", [crisp, crisp.hw], ids=lambda one: one.__name__)
def test_what_is_imported_later_is_what_a_type_checker_sees(package: ModuleType) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        name.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }
    assert seen == package._MODULES


def test_a_function_is_not_hidden_by_the_module_of_its_name() -> None:
    for name in ("crisp.sim.simulate", "crisp.sim.fast_simulate", "crisp.hw.replay"):
        import_module(name)
    assert callable(crisp.sim.simulate)
    assert callable(crisp.sim.fast_simulate)
    assert callable(crisp.hw.replay)


def test_import_crisp_imports_nothing_large() -> None:
    code = (
        "import sys, crisp; before = set(sys.modules); import crisp.sim, crisp.hw; "
        "print('numpy' in before, [name for name in ('numba', 'torch', 'pandas', 'joblib', 'rich') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False []\n"
