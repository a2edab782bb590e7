"""Compare simulation with measurement, cell by cell: docs/fidelity.md and fidelity.json.

Run it with `make fidelity`. It needs about 7 GB of disk and a quiet machine for half an hour: no
run is discarded, so whatever else runs meanwhile is in the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from matrix import GEOMETRIES, MODES, WHOLE, beside_all, measure_all
from page import page

from crisp.errors import CrispError
from crisp.files import atomic


def main() -> int:
    """Measure, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4, help="of a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30, help="of each calibration")
    parser.add_argument("--modes", default=",".join(MODES), help="of reading: some of them")
    parser.add_argument("--stores", type=Path, help="a folder to keep the stores in")
    parser.add_argument("--raw-only", action="store_true", help="renew what stands beside reads")
    parser.add_argument("--out", type=Path, default=Path("docs/fidelity.md"))
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(dir=options.stores or Path()) as folder:
            place, record = Path(folder), options.out.with_suffix(".json")
            if options.raw_only:
                content = json.loads(record.read_text("utf-8"))
                content["beside_raw"] = beside_all(place, options.tokens, GEOMETRIES)
            else:
                modes = {name: MODES[name] for name in options.modes.split(",")}
                content = measure_all(
                    place, options.tokens, options.repeats, options.seconds, modes, GEOMETRIES
                )
            if options.raw_only or "free" in options.modes:
                content["beside_raw"] += beside_all(place, options.tokens, [WHOLE])
    except CrispError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with atomic(record) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with atomic(options.out) as temporary:
        temporary.write_text(page(content), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
