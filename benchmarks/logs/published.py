"""What BigMoeOnEdge published of three runs: metrics of each token, flags, and replay curves."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

RUNS, CURVES = (
    "logs/bigmoeonedge/2026-07-15-route-trace",
    "logs/bigmoeonedge/2026-07-20-cache-replay",
)
MIB = 1 << 20


@dataclass(frozen=True)
class Model:
    """One of the three models, and where its files are."""

    key: str
    title: str
    hit_percent: float  # as the project states it
    mib_per_token: float

    def log(self, data: Path) -> Path:
        """Return the route trace."""
        return data / RUNS / f"{self.key}.route.csv"


MODELS = (
    Model("gptoss", "gpt-oss-120b", 32.41, 501.19),
    Model("qwen", "Qwen3-30B-A3B", 74.88, 156.44),
    Model("gemma", "gemma-4-26B", 76.78, 123.32),
)


@dataclass(frozen=True, eq=False)
class Metrics:
    """The metrics of a run, a number for each decoded token."""

    wall_ms: npt.NDArray[np.float64]
    stall_ms: npt.NDArray[np.float64]
    compute_ms: npt.NDArray[np.float64]
    management_ms: npt.NDArray[np.float64]
    read_bytes: npt.NDArray[np.int64]
    hit_percent: list[str]  # cumulative, as printed
    budget_bytes: int
    ms_per_token: float


def read_metrics(data: Path, model: Model) -> Metrics:
    """Read a .metrics file: a table, and a summary below it."""
    lines = (data / RUNS / f"{model.key}.metrics").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    summary = dict(re.findall(r"(\S+)=(\S+)", lines[-1]))

    def column(name: str) -> npt.NDArray[np.float64]:
        return np.array([float(row[name]) for row in rows])

    return Metrics(
        column("wall_ms"),
        column("stall_ms"),
        column("compute_ms"),
        column("mgmt_ms"),
        np.array([int(row["read_bytes"]) for row in rows], np.int64),
        [row["cache_hit_pct"] for row in rows],
        int(float(summary["cache_budget_MiB"]) * MIB),
        1000 * float(summary["s/tok"]),
    )


def read_curve(data: Path, model: Model) -> dict[tuple[int, str], tuple[str, str, str]]:
    """Return (MiB, rule) -> (cumulative hit %, decode hit %, MiB read), each as printed."""
    with (data / CURVES / f"{model.key}-curve.csv").open(encoding="utf-8") as file:
        return {
            (int(row["budget_mib"]), row["policy"]): (
                row["hit_pct_cum"],
                row["hit_pct_decode"],
                row["read_mib"],
            )
            for row in csv.DictReader(file)
        }


def read_flags(data: Path, model: Model) -> npt.NDArray[np.bool_]:
    """Return the residency flags of all decoded tokens, in the order of the log."""
    with model.log(data).open(encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return np.array([row["residency"] == "1" for row in rows if row["phase"] == "1"])
