"""The section of docs/policies.md about this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def hardware_section(measured: Row) -> str:
    """Return the section, from what `benchmarks.policies.hardware` measured."""
    conditions = measured["conditions"]
    head = (
        "## On a machine\n\n"
        f"Measured on {conditions['date']}: {conditions['processor']}, "
        f"{conditions['cores']} cores, Linux {conditions['kernel']}; `crisp replay` of "
        f"{conditions['tokens']} tokens and `crisp generate` of {conditions['written']}, each "
        f"{conditions['repeats']} times, by turns in an order of its own; medians. The stores of "
        "replays have the sizes of a larger model, more than 2 GB of random weights; they have as "
        "many layers and experts as the small model, whose routing, router weights, contributions "
        "(spread evenly over the larger one's blocks) and sensitivities decide. Policies are those "
        f"chosen above for the largest loss. Paced: {_rate(conditions['paced'])} from the disk, "
        f"{_rate(conditions['paced_writing'])} where the small models write. *times faster*: "
        "tokens/s over those of `lru`; *times fewer*: its bytes over a policy's. The last columns "
        "are ms a token: compute waits for loads, computes experts, does all else (attention and "
        "router where a model writes); and what deciding takes."
    )
    parts = [head]
    for model in measured["models"]:
        for what, title in (("replayed", "replay"), ("written", "writing")):
            parts.append(f"{model['name']}, {title}:\n\n{_table(model[what])}")
    return "\n\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    headings = (
        "link", "budget", "policy", "tokens/s", "times faster", "MB a token", "times fewer",
        "waits", "experts", "else", "deciding",
    )  # fmt: skip
    base = {(row["mode"], row["budget"]): row for row in rows if row["family"] == "lru"}
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for row in rows:
        lru = base[row["mode"], row["budget"]]
        cells = (
            row["mode"],
            row["budget"],
            row["family"],
            f"{row['tokens_per_second']:.2f}",
            f"{row['tokens_per_second'] / lru['tokens_per_second']:.2f}",
            f"{row['bytes_per_token'] / 1e6:.3g}",
            f"{lru['bytes_per_token'] / row['bytes_per_token']:.2f}",
            f"{row['stall_ms_per_token']:.1f}",
            f"{row['compute_ms_per_token']:.1f}",
            f"{row['layer_ms_per_token']:.1f}",
            f"{deciding_ms(row):.2f} ({100 * deciding_share(row):.1f} %)",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def deciding_ms(row: Row) -> float:
    """Return the time of a token in the scheduler, in ms."""
    return float(row["queue_us_per_token"]) / 1e3


def deciding_share(row: Row) -> float:
    """Return it as a share of the token's time."""
    return deciding_ms(row) * float(row["tokens_per_second"]) / 1e3


def _rate(bytes_per_second: int) -> str:
    return f"{bytes_per_second / 1e6:g} MB/s"
