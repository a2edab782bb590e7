"""Describe a machine of your own, and see what it does with a trace."""

from pathlib import Path
from tempfile import TemporaryDirectory

from crisp import Conditions, load_setup
from crisp.sim import simulate

# Every number has a source. docs/hardware.md explains the keys; crisp calibrate measures them.
MACHINE = """
kind = "disk"
model = "analytic"
no_power = "not measured"
[link]
bandwidth_gb_s = { value = 6.5, source = "fio, direct reads of 16 MB, on my NVMe disk" }
latency_us = { value = 80, source = "the same, of 4 kB" }
[compute]
rate_tflops = { value = 1.2, source = "a matrix product of numpy, 2048 x 2048, float32" }
launch_us = { value = 5, source = "an estimate" }
[memory]
bandwidth_gb_s = { value = 70, source = "STREAM, triad" }
"""
setup = load_setup("tiny-mixtral-docs", model="mixtral-8x7b", conditions=Conditions(limit=200))
with TemporaryDirectory() as folder:
    mine = Path(folder) / "my-machine.toml"
    mine.write_text(MACHINE)
    # The Jetson copies experts within its one memory, faster than the card gets them over PCIe.
    for machine in (mine, "jetson-agx-orin-32gb", "rtx4090-pcie4"):
        ms = simulate(setup.case("crisp", "25%"), machine).metrics["ms_per_token_mean"]
        print(f"{Path(machine).name:21} {ms:7.1f} ms a token")
