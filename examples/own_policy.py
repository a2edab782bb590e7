"""Run rules of your own, first simulated and then on this machine (needs the extra hf)."""

from pathlib import Path
from tempfile import TemporaryDirectory

import own_rules  # noqa: F401  the file beside this one: importing it registers its rules

from crisp import load_setup
from crisp.hw import DeviceOptions, pack, replay
from crisp.sim import simulate

ROOT = Path(__file__).resolve().parents[1]

with TemporaryDirectory(dir=".") as folder:  # here, as /tmp may be in memory
    store = pack(ROOT / "traces/tiny-mixtral", Path(folder))  # the experts, as blocks
    setup = load_setup("tiny-mixtral-docs", model=folder)
    policy = setup.policy("lru", width="second(share=.25)", cache="largest")
    case = setup.case(policy, "50%", limit=100)
    for run in (simulate(case, "rtx4090-pcie4"), replay(case, store, DeviceOptions())):
        hits, loaded = run.metrics["hits"], run.metrics["bytes_loaded"]
        print(f"{run.settings['engine']:5} {hits} hits, {loaded:,} bytes loaded")
