"""``crisp calibrate``: measure a device, as a hardware profile that simulations can use."""

from __future__ import annotations

from typing import Annotated

import typer

from crisp.cli import flags


def calibrate(
    store: flags.StoreFolder,
    out: Annotated[str, typer.Option(metavar="FILE", help="The profile to write: x.toml.")],
    device: flags.Device = "cpu",
    threads: flags.Threads = 1,
    link_limit: flags.LinkLimit = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 60,
) -> None:
    """Measure loads and computations on a device, as a hardware profile to simulate with."""
    from crisp.cli.progress import progress_share
    from crisp.cli.targets import check_outputs
    from crisp.files import atomic
    from crisp.units import parse_rate
    from hw.calibrate import calibrated, check_seconds
    from hw.options import Options
    from hw.store import Store

    check_outputs({"--out": out}, [("--store", store)], stdout=False)
    check_seconds(seconds)
    limit = None if link_limit is None else parse_rate(link_limit, "--link-limit")
    options = Options(device, threads=threads, link_limit=limit)
    opened = Store.open(store)
    with progress_share("measuring") as update:
        done = calibrated(opened, options, seconds, update)
    with atomic(out) as temporary:
        temporary.write_text(done.toml(), encoding="utf-8")
    slow = done.tables.slow_load, done.tables.slow_compute
    size, ns = done.tables.load.at[-1], done.tables.load.ns[-1]
    print(
        f"{out}: an expert of {opened.spec.name} loads in {float(ns) / 1e6:.3g} ms "
        f"({float(size / ns):.3g} GB/s) and computes in "
        f"{float(done.tables.compute.ns[-1][0]) / 1e6:.3g} ms; beside the other stream they take "
        f"{float(slow[0]):.3g} and {float(slow[1]):.3g} times as long"
    )
