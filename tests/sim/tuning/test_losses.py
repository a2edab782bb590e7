"""Losses as they are read, and what no other point beats."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from crisp.cli.output.tuning_tables import format_command
from crisp.errors import CrispError
from crisp.policy import named
from crisp.run.result import Run
from crisp.run.setup import load_setup
from crisp.sim import hardware_profile
from crisp.sim.tuning.candidates import CACHES, TunedPolicy, find_candidates
from crisp.sim.tuning.losses import Loss, front, read_losses, same_budget

ROW = Loss("crisp", "uniform(share=0.5)", "lru", "layer", "expert", None, 0.25, (0.24, 0.26))


def measured(width: str, ratio: float | None, budget: str | None = None) -> dict[str, Any]:
    """As crisp eval writes it, as far as it is read."""
    return {
        "settings": {
            "model": "toy",
            "expert_blocks": 8,
            "policy": {
                "name": "crisp", "width": width, "order": "widest", "cache": "lru",
                "scope": "layer", "unit": "expert", "prefetch": "none",
            },
            "budget": None if budget is None else {"asked": budget, "share": 0.1},
        },
        "metrics": {
            "ratio": ratio,
            "ratio_interval": None if ratio is None else [ratio - 0.01, ratio + 0.01],
        },
    }  # fmt: skip


def losses(*results: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "tool": "crisp", "results": [measured("full", None), *results]}


def test_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    path.write_text(json.dumps(losses(measured("uniform(share=0.5)", 1.25, "10%"))))
    found = read_losses(path)
    assert (found.model, found.expert_blocks) == ("toy", 8)
    assert found.rows == [
        Loss("lru", "full", "lru", "layer", "expert", None, 0.0, (0.0, 0.0)),
        Loss("crisp", "uniform(share=0.5)", "lru", "layer", "expert", "10%", 0.25, (0.24, 0.26)),
    ]


def test_what_was_measured_with_rescaling_is_tried_with_it(tmp_path: Path) -> None:
    """The same widths with and without it are two measurements, and two policies."""
    path, rescaled = tmp_path / "loss.json", measured("uniform(share=0.5)", 1.2)
    rescaled["settings"]["policy"]["rescale"] = "measured"
    path.write_text(json.dumps(losses(measured("uniform(share=0.5)", 1.25), rescaled)))
    found = read_losses(path)
    assert [row.rescale for row in found.rows] == ["none", "none", "measured"]
    machine = hardware_profile("rtx4090-pcie4")
    setup = load_setup("tiny-mixtral-docs", model="mixtral-8x7b", hardware=machine)
    tried = find_candidates(setup, found, str(path), "10%", "bytes").tried
    assert len(tried) == 3 * len(CACHES)
    for candidate in tried:
        assert candidate.planned.policy.rescale == candidate.loss.rescale


@pytest.mark.parametrize(
    ("name", "rescale", "words"),
    [
        ("crisp", "none", None),
        ("crisp", "measured", "--rescale measured"),
        ("saliency", "measured", None),
        ("saliency", "none", "--rescale none"),
    ],
)
def test_the_command_says_of_rescaling_what_the_name_does_not(
    name: str, rescale: str, words: str | None
) -> None:
    policy = named(name, rescale=rescale, prefetch="none")
    run = Run(settings={"policy": policy.to_dict()}, metrics={}, unavailable={}, provenance={})
    command = format_command(TunedPolicy(ROW, run), "trace", "10%", {})
    assert words in command if words else "--rescale" not in command


def test_a_loss_under_a_routing_rule_is_refused(tmp_path: Path) -> None:
    path, row = tmp_path / "loss.json", measured("full", 1.25, "10%")
    row["settings"]["policy"]["routing"] = "skip-missing(keep=1)"
    path.write_text(json.dumps(losses(row)))
    with pytest.raises(CrispError, match=r"measured with routing skip-missing\(keep=1\), which a"):
        read_losses(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON, as crisp eval --json writes it"),
        ("[]", "is not what crisp eval --json writes"),
        ("{}", "is not what crisp eval --json writes"),
        ('{"version": 1, "results": []}', "is not what crisp eval --json writes"),
        ('{"version": 1, "results": [{"settings": {}}]}', "is not what crisp eval --json writes"),
        ('{"version": 2, "results": []}', "made by another version of crisp"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "loss.json"
    path.write_text(content)
    with pytest.raises(CrispError, match=rf"loss\.json: {message}$"):
        read_losses(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CrispError, match="cannot be read: No such file"):
        read_losses(tmp_path / "x")


def test_budgets_are_compared_by_what_they_mean() -> None:
    assert same_budget(".1", "10%")
    assert same_budget("1GB", "1000MB")
    assert not same_budget("10%", "1GB")


def test_the_front_is_what_nothing_beats() -> None:
    """Each point against each other one."""
    draw = random.Random(1)
    for n in range(1, 9):
        points = [(draw.randrange(5), draw.randrange(5)) for _ in range(n)]
        found = front(points, lambda p: p[0], lambda p: p[1])
        beaten = {
            own
            for own, other in itertools.permutations(points, 2)
            if other != own and other[0] <= own[0] and other[1] <= own[1]
        }
        assert found == sorted(set(points) - beaten)
