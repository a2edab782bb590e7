"""Make what `crisp reproduce` cannot compute itself: crisp/reproduce/data/{routing,host}.json.

    python benchmarks/reproduction.py --data DIR

DIR/traces holds statistics of a real Mixtral-8x7B's routing, as `crisp trace synth` reads them; a
few means over its layers are kept. What the host spends on deciding is measured on this machine
(benchmarks/deciding.py says how). crisp/reproduce/data/quality.json comes from `make quality`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.deciding import PAPER, PARTS, routing, small
from crisp.files import atomic
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.trace.chains import read_chains
from crisp.trace.describe import percent_of

TIMES = 5  # the one that took least counts: other work only adds
DATA = Path(__file__).resolve().parents[1] / "crisp" / "reproduce" / "data"
EXPERTS, TOP, BOTTOM, DIGITS = 8, 25, 29, 4
PAIRS, PERSISTENCE = "mixtral-8x7b-pair-counts.csv", "mixtral-8x7b-persistence.csv"
SOURCE = (
    "Mixtral-8x7B-Instruct decoding 70 sequences of MT-Bench, about 14,000 tokens: means over its "
    "32 layers"
)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(prog="benchmarks/reproduction.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, required=True, help="the folder with traces/")
    data: Path = parser.parse_args().data
    for name, content in (("routing", statistics(data / "traces")), ("host", deciding())):
        with atomic(DATA / f"{name}.json") as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def statistics(folder: Path) -> dict[str, Any]:
    """Return means over the layers; neither frequent pairs nor single layers are kept."""
    chains = read_chains(folder / PAIRS, folder / PERSISTENCE)
    n = EXPERTS * (EXPERTS - 1) // 2
    shares = np.zeros((len(chains), n))
    for row, chain in enumerate(chains.values()):
        shares[row, : len(chain.share)] = -np.sort(-chain.share)
    table = np.loadtxt(folder / PERSISTENCE, delimiter=",", skiprows=1)
    heavier = [(c.share * np.maximum(c.first, 1 - c.first)).sum() for c in chains.values()]
    top = shares[:, : percent_of(TOP, n)].sum(axis=1)
    bottom = shares[:, n - percent_of(BOTTOM, n) :].sum(axis=1)
    return {
        "source": SOURCE,
        "layers": len(chains),
        "pair_shares": shares.mean(axis=0).round(DIGITS).tolist(),  # most frequent first
        "in_common": table[:, 1:].mean(axis=0).round(DIGITS).tolist(),  # 0, 1 or 2 experts
        "first_choice": round(float(np.mean(heavier)), DIGITS),  # how often a pair's likelier is
        "top_25_by_layer": _range(top),
        "bottom_29_by_layer": _range(bottom),
    }


def _range(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """Return the least, mean and greatest value."""
    return [round(float(value), DIGITS) for value in (values.min(), values.mean(), values.max())]


def deciding() -> dict[str, Any]:
    """Return us a token of the policy crisp at a budget of 25 %, for each model's counts."""
    from crisp.hw.devices.options import DeviceOptions
    from crisp.hw.replay import replay
    from crisp.hw.store.packing import pack_synthetic

    us_a_token = {}
    for model in PAPER:
        spec = small(ModelSpec.named(model))
        trace = routing(spec)
        with tempfile.TemporaryDirectory() as folder:
            store = pack_synthetic(spec, Path(folder) / "store")
            case = Case(
                trace, spec, named("crisp"), Budget.parse("25%"), Profile.from_trace(trace),
                Conditions("expert"),
            )  # fmt: skip
            measured = [replay(case, store, DeviceOptions()).metrics for _ in range(TIMES)]
        spent = [[float(run[f"{part}_us_per_token"] or 0) for part in PARTS] for run in measured]
        us_a_token[model] = [round(us, 1) for us in min(spent, key=sum)]
    return {
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "us_a_token": us_a_token,
    }


if __name__ == "__main__":
    main()
