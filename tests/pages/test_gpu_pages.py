"""The guides for machines with a GPU: their commands, with --dry-run and small stand-ins."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("xxhash", reason="needs the extra hf")

from crisp.cli.main import main
from crisp.hw.store.packing import pack, pack_synthetic
from crisp.model.spec import ModelSpec

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("guide", ["rtx4090", "jetson-orin"])
def test_the_commands_of_a_guide(
    guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store of as many layers, experts and blocks stands for Mixtral's, whose neurons are
    larger; what would be packed is checked by its size."""
    page = (ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^\$ crisp (.*)$", page, re.M)]
    assert [command[0] for command in commands][:3] == ["pack", "replay", "calibrate"]
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    layers = int(commands[0][commands[0].index("--layers") + 1])
    spec = ModelSpec.named("mixtral-8x7b").first_layers(layers)
    small = replace(spec, d_model=64, d_ff=128, block=16)
    pack_synthetic(small, Path("mixtral"))
    pack(Path("traces/tiny-mixtral"), Path("small"), block=16)
    files = sorted(tmp_path.rglob("*"))
    for command in commands:
        with pytest.raises(SystemExit) as end:
            main([*command, "--dry-run"])
        out, err = capsys.readouterr()
        assert (end.value.code or 0, err) == (0, ""), command
        assert "dry run" in out
        if command[0] == "pack":
            (size,) = re.findall(r"mixtral-8x7b, ([\d.]+) GB", out)
            assert float(size) * 1e9 == pytest.approx(spec.routed_bytes, rel=0.01)
            assert re.search(rf": {size} GB of disk", page)
        elif command[0] != "calibrate":
            assert "of budget, the rest for staging" in out
    assert sorted(tmp_path.rglob("*")) == files
