"""Run rules of your own, first simulated and then on this machine (needs the extra hf)."""

from pathlib import Path

import own_rules  # noqa: F401  the file beside this one: importing it registers its rules

from crisp import load_setup
from crisp.hw import DeviceOptions, pack, replay
from crisp.sim import simulate

ROOT = Path(__file__).resolve().parents[1]

store = pack(ROOT / "traces/tiny-mixtral", Path("store"))  # the experts, as blocks on the disk
setup = load_setup("tiny-mixtral-docs", model="store")
policy = setup.policy("lru", width="second(share=.25)", cache="largest")
case = setup.case(policy, "50%", limit=100)
for run in (simulate(case, "rtx4090-pcie4"), replay(case, store, DeviceOptions())):
    hits, loaded = run.metrics["hits"], run.metrics["bytes_loaded"]
    print(f"{run.settings['engine']:5} {hits} hits, {loaded:,} bytes loaded")
