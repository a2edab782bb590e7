"""What a user installs works by itself: from an empty environment, from any working folder."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from crisp import __version__
from hatch_build import RELATIVE_LINK, long_description

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = "crisp/bundled_traces/"
INFO = f"crisp_moe-{__version__}.dist-info"
BASE = {
    "numpy",
    "pandas",
    "pyarrow",
    "simpy",
    "numba",
    "joblib",
    "safetensors",
    "matplotlib",
    "typer",
    "rich",
}


def run(*command: str | Path, cwd: Path, home: Path | None = None) -> str:
    """The output of a command that must succeed, run without what Python's variables could add."""
    environment = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
    if home is not None:
        environment["HOME"] = str(home)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("crisp_moe-*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that was empty until pip installed the wheel with all it depends on.

    The constraints only choose which release of a dependency: one tested here, and one that pip
    still has from the installation of the tests' own environment.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    install(folder, "-c", ROOT / "constraints.txt", wheel)
    return folder


def install(environment: Path, *arguments: str | Path) -> None:
    pip = [environment / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile"]
    run(*pip, *arguments, cwd=environment)


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, environment: Path, wheel: Path) -> Path:
    """The programs of an environment with CRISP installed one way or the other."""
    what = [wheel] if request.param == "wheel" else ["-e", ROOT]
    install(environment, "--no-deps", "--force-reinstall", *what)
    return environment / "bin"


@pytest.mark.slow
def test_the_demonstration_runs_beside_folders_named_like_our_packages(
    installed: Path, tmp_path: Path
) -> None:
    for name in ("sim", "hw"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the working folder')")
    run(installed / "crisp", "demo", "--quick", "--out", "pictures", cwd=tmp_path, home=tmp_path)
    pictures = [path for path in (tmp_path / "pictures").iterdir() if path.suffix == ".png"]
    assert len(pictures) >= 2
    assert all(path.stat().st_size > 1000 for path in pictures)


@pytest.mark.slow
def test_every_module_imports_without_the_extras_and_without_plotting(
    installed: Path, tmp_path: Path
) -> None:
    """But for the kernels, which are nothing without triton and imported when they are run."""
    program = """
import importlib, pkgutil, sys
KERNELS = tuple(f"crisp.hw.devices.gpu.kernels.{name}" for name in ("blocks", "calls"))
for module in pkgutil.walk_packages(importlib.import_module("crisp").__path__, "crisp."):
    if not module.name.endswith(("__main__", *KERNELS)):
        importlib.import_module(module.name)
print(sorted({"matplotlib", "torch", "transformers"} & set(sys.modules)))
print(importlib.util.find_spec("torch"))
"""
    assert run(installed / "python", "-I", "-c", program, cwd=tmp_path) == "[]\nNone\n"


@pytest.mark.slow
def test_the_bundled_traces_are_found(installed: Path, tmp_path: Path) -> None:
    program = """
from crisp.trace.bundled import bundled_traces
print(*sorted(path.name for path in bundled_traces().values()), sep="\\n")
"""
    names = run(installed / "python", "-I", "-c", program, cwd=tmp_path).split()
    assert names == sorted(path.name for path in (ROOT / "traces").glob("*.trace.safetensors"))
    assert names


def files(folder: str, pattern: str) -> set[str]:
    """The files of a folder of the checkout, whose packages sim and hw are links."""
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob(pattern)}


def test_the_wheel_holds_what_runs_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    profiles = files("crisp/sim/profiles", "*.toml")
    assets = files("crisp/report/assets", "*.*") | files("crisp/reproduce/data", "*.*")
    traces = {BUNDLED + path.name for path in (ROOT / "traces").glob("*.trace.safetensors")}
    assert profiles
    assert traces
    assert assets
    assert names >= profiles | assets | {"crisp/py.typed"}
    assert names >= files("crisp/sim", "**/*.py") | files("crisp/hw", "**/*.py")
    assert {name for name in names if name.startswith(BUNDLED)} == traces | {BUNDLED + "README.md"}
    assert {name.split("/")[0] for name in names} == {"crisp", INFO}
    assert INFO + "/licenses/LICENSE" in names
    assert not [name for name in names if name.endswith(("model.safetensors", ".pyc"))]


def test_the_source_distribution_holds_traces_tests_and_licence(built: Path) -> None:
    with tarfile.open(next(built.glob("crisp_moe-*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    traces = [path for path in (ROOT / "traces").rglob("*.*") if path.suffix != ".pyc"]
    assert traces
    assert names >= {path.relative_to(ROOT).as_posix() for path in traces}
    assert names >= {"LICENSE", "README.md", "Makefile", "constraints.txt", "hatch_build.py"}
    assert names >= {"tests/test_packaging.py", "crisp/sim/__init__.py", "crisp/hw/__init__.py"}
    assert names >= files("tests", "**/*.py") | files("examples", "*.*") | files("docs", "*.md")
    assert not [name for name in names if name.startswith((".venv", ".git/", "out/"))]
    assert not [name for name in names if name.startswith(("sim/", "hw/"))]  # once is enough


def test_torch_comes_with_the_extras_that_need_it_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(INFO + "/METADATA"))
    extras: dict[str, set[str]] = {}
    for requirement in metadata.get_all("Requires-Dist", []):
        name = re.match(r"[\w-]+", requirement)
        extra = re.search(r"extra == '(\w+)'", requirement)
        assert name
        extras.setdefault(extra[1] if extra else "", set()).add(name[0])
    assert extras[""] == BASE
    assert extras["jetson"] == {"jetson-stats"}
    assert {extra for extra, names in extras.items() if "torch" in names} == {"hf", "gpu", "eval"}
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_long_description_has_no_link_that_leads_nowhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(INFO + "/METADATA"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = metadata.get_payload(decode=True)
    assert isinstance(text, bytes)
    assert text.decode("utf-8").strip() == long_description(readme, urls.get("Repository")).strip()
    assert not RELATIVE_LINK.search(text.decode("utf-8"))


def test_a_repository_completes_the_links_of_the_long_description() -> None:
    readme = "![A](docs/a.png) [B](docs/b.md#c), [D](https://d) [E](#e)"
    assert long_description(readme, "https://host/crisp") == (
        "![A](https://host/crisp/raw/HEAD/docs/a.png) "
        "[B](https://host/crisp/blob/HEAD/docs/b.md#c), [D](https://d) [E](#e)"
    )
    assert long_description(readme, None) == " B, [D](https://d) [E](#e)"


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["authors"] == [{"name": "The CRISP developers"}]
    assert [reference["url"].rsplit("/")[-1] for reference in citation["references"]] == [
        "2610.37442"
    ]


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert targets
    assert set(
        re.findall(r"^  make ([\w-]+) ", run("make", "help", cwd=ROOT), re.MULTILINE)
    ) == set(targets[1].split())


def test_pre_commit_checks_what_make_checks() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    checks = re.findall(r"^\t\$\(TEST\)/((?:ruff|mypy|lint-imports).*)$", makefile, re.MULTILINE)
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    assert hooks == [f".venv-test/bin/{check}" for check in checks]
