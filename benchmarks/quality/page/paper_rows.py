"""The paper's figures, of models of some thousand times the size, for rows of our tables."""

from __future__ import annotations

# By experiment, then by row: as it is printed in the last column.
ROWS: dict[str, dict[str, str]] = {
    "policies": {
        "full": "3.84",
        "uniform 50 %": "4.67 (+21.6 %)",
        "tiered": "3.98 (+3.6 %)",
    },
    "orders": {
        "random": "6.83 (+77.9 %)",
        "original": "5.92 (+54.2 %)",
        "magnitude": "4.89 (+27.3 %)",
        "importance": "4.21 (+9.6 %)",
    },
    "strategies": {
        "full": "3.84, I/O 100 %",
        "all 75 %": "4.18 (+8.9 %), 75 %",
        "all 50 %": "4.67 (+21.6 %), 50 %",
        "single": "5.84 (+52.1 %), 25 %",
        "asymmetric 100 + 50": "4.02 (+4.7 %), 75 %",
        "tiered": "3.98 (+3.6 %), 42 %",
    },
    "classes": {
        "top 10 %": "4.6 %",
        "10 to 50 %": "2.8 %",
        "bottom 50 %": "2.0 %",
    },
    "tiers": {"hot": "99.9 %, 60 %", "warm": "99.1 %, 30 %", "cold": "94.7 %, 10 %"},
    "cold": {"100 %": "100 %, I/O 100 %", "50 %": "between, I/O 75 %", "0 %": "94.7 %, I/O 50 %"},
}
