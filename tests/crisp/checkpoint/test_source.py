"""Where a model is and what it is called: folders, snapshots of the hub's cache, names."""

from __future__ import annotations

from pathlib import Path

import pytest

from crisp.checkpoint.source import ModelSource, find_model, local_model
from crisp.errors import CrispError

REVISION = "4f1b0c9e2a7d4f1b0c9e2a7d4f1b0c9e2a7d4f1b"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in the hub's cache: files are links to blobs, as its library lays them."""
    repository = tmp_path / "hub" / "models--acme--TinyMoE"
    folder = repository / "snapshots" / REVISION
    for part in (repository / "blobs", repository / "refs", folder):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    for number, name in enumerate(("config.json", "model.safetensors")):
        blob = repository / "blobs" / f"{number:040x}"
        blob.write_text("{}")
        (folder / name).symlink_to(Path("../../blobs") / blob.name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder


def test_a_name_a_snapshot_and_a_link_to_it_are_the_same_model(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    monkeypatch.chdir(snapshot)
    for name in ("acme/TinyMoE", snapshot, f"{snapshot}/", link, "."):
        found = find_model(name)
        assert (found.name, found.revision) == ("acme/TinyMoE", REVISION)
        assert (found.folder / "config.json").read_text() == "{}"


def test_the_folder_of_a_repository_means_its_snapshot(snapshot: Path) -> None:
    repository = snapshot.parents[1]
    assert local_model(repository) == find_model(repository).folder == snapshot
    assert local_model("acme/TinyMoE") == snapshot
    assert local_model("acme/Other") == Path("acme/Other")
    (snapshot / "config.json").unlink()
    assert local_model(repository) == repository
    (snapshot / "model-Q4_K_M.gguf").touch()  # such repositories often have nothing else
    assert local_model("acme/TinyMoE") == snapshot


def test_a_folder_is_called_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        assert ModelSource.of_folder(path).name == "mine"
        assert ModelSource.of_folder(path).revision is None


@pytest.mark.parametrize("name", ["none", "./none", "a/b/c", "acme/../x", "acme/"])
def test_what_is_neither_a_folder_nor_a_name_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CrispError, match="is no folder; one with a transformers checkpoint"):
        find_model(name)


def test_a_file_is_no_model(snapshot: Path) -> None:
    with pytest.raises(CrispError, match="is no folder"):
        find_model(snapshot / "config.json")


def test_nothing_is_downloaded_where_that_was_not_asked(snapshot: Path) -> None:
    with pytest.raises(CrispError, match="is no folder, and not in the cache"):
        find_model("acme/Other", download=False)
