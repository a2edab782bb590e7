"""Run many simulations on all cores, and find what loads least at each budget.

crisp sweep does the same from a file, resumably, with intervals: docs/sweeps.md.
"""

import pandas as pd

from crisp import Conditions, load_setup
from crisp.sim import hardware_profile, plan_run, run_all


def main() -> None:
    """Print the best five of 12 thresholds at one budget, then at another."""
    machine = hardware_profile("rtx4090-pcie4")
    setup = load_setup("tiny-mixtral-docs", hardware=machine, conditions=Conditions(limit=200))
    widths = [f"tiered(alpha={a / 10},beta={b / 10})" for a in (2, 4, 6) for b in (6, 7, 8, 9)]
    cells = [(width, budget) for budget in ("10%", "30%") for width in widths]
    policies = {width: setup.policy("crisp", width=width) for width in widths}
    runs = run_all([plan_run(setup, policies[width], budget) for width, budget in cells])
    table = pd.DataFrame(cells, columns=["width", "budget"])
    for metric, digits in (("bytes_per_token", None), ("tokens_per_second", None), ("hit_rate", 3)):
        table[metric] = [round(run.metrics[metric], digits) for run in runs]
    table = table.sort_values(["budget", "bytes_per_token"])
    print(table.groupby("budget").head(5).to_string(index=False))


if __name__ == "__main__":  # other processes import this file
    main()
