"""Measure the joules of a command, as often as it takes to know them to 5 %.

crisp energy -- COMMAND does the same; docs/energy.md says what each meter measures.
"""

import sys

from crisp import StoppingRule
from crisp.hw import find_meter, measure_command

command = sys.argv[1:] or [sys.executable, "-c", "sum(range(10**7))"]
meter = find_meter(None)  # of a Jetson, a GPU or a processor; or a text that says why there is none
measured = measure_command(command, meter, idle=0.5, rule=StoppingRule.parse("5%", 10))
first = measured.runs[0]
print(f"{first.ended.ns / 1e9:.2f} s, exit code {measured.code}")
if measured.gross is None:
    why = measured.ended.partition(" (")[0]  # crisp doctor says it at length
    print(f"no joules: {why}")
else:
    print(f"{measured.gross.mean:.2f} J +- {measured.gross.half_width or 0:.2f}, {measured.ended}")
    print(f"{measured.watts:.1f} W on average")
