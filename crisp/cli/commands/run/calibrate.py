"""``crisp calibrate``: measure a device, as a hardware profile that simulations can use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crisp.cli.options import flags

_DISTURBED = 0.25  # spread: half of the means lie that far apart


def calibrate(
    store: flags.StoreFolder,
    out: Annotated[str, typer.Option(metavar="FILE", help="The profile to write: x.toml.")],
    device: flags.Device = "cpu",
    threads: flags.Threads = None,
    link_limit: flags.LinkLimit = None,
    host_limit: flags.HostLimit = None,
    loads_from: flags.LoadsFrom = None,
    read: flags.Read = "direct",
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Time the layers of this model; without one, of a replay, which has no attention.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="About how long to measure, opening not counted.")
    ] = 60,
    dry_run: flags.DryRun = False,
) -> None:
    """Measure a device, as a hardware profile to simulate with."""
    import sys

    from crisp.cli.options.devices import device_options, open_store
    from crisp.cli.options.files import check_outputs
    from crisp.cli.output.progress import ReadingProgress, progress_share
    from crisp.errors import CrispError
    from crisp.files import atomic
    from crisp.hw.calibration.calibrate import (
        calibrate_device,
        check_seconds,
        least_seconds,
        pool_slots,
    )
    from crisp.hw.model.resident import open_resident, same_geometry
    from crisp.units import format_bytes

    check_outputs({"--out": out}, [("--store", store), ("--model", model)], stdout=False)
    check_seconds(seconds)
    options = device_options(
        device, threads=threads, link_limit=link_limit, host_limit=host_limit,
        loads_from=loads_from, read=read, progress=ReadingProgress(),
    )  # fmt: skip
    if loads_from == "mapped":
        raise CrispError("--loads-from mapped: loads nothing that could be measured")
    opened = open_store(store)
    if model is not None:
        same_geometry(model, opened)
    least = 0.0 if options.link_limit is None else least_seconds(opened, options.link_limit)
    if least > seconds:
        print(
            f"--link-limit {link_limit}: to load everything once takes {least:,.0f} seconds, more "
            f"than --seconds {seconds:g}",
            file=sys.stderr,
        )
    if dry_run:
        size = pool_slots(opened) * opened.spec.block_bytes
        print(f"dry run: {options}, a pool of {format_bytes(size)}; nothing was opened or measured")
        return
    with progress_share("measuring") as update:
        loaded = None
        if model is not None:
            loaded = open_resident(model, opened, device=options.torch_device)
        calibration = calibrate_device(opened, options, seconds, update, loaded)
    with atomic(out) as temporary:
        temporary.write_text(calibration.toml(), encoding="utf-8")
    slow = calibration.tables.slow_load, calibration.tables.slow_compute
    size, ns = calibration.tables.load.at[-1], calibration.tables.load.ns[-1]
    compute_ms = float(calibration.tables.compute.ns[-1][0]) / 1e6
    print(
        f"{out}: an expert of {opened.spec.name} loads in {float(ns) / 1e6:.3g} ms "
        f"({float(size / ns):.3g} GB/s) and computes in {compute_ms:.3g} ms; beside the other "
        f"stream they take {float(slow[0]):.3g} and {float(slow[1]):.3g} times as long"
    )
    spreads = dict(calibration.tables.spreads)
    spread_texts = ", ".join(f"{name} {100 * spread:.0f} %" for name, spread in spreads.items())
    print(f"half of the means lie within: {spread_texts} of their median")
    if max(spreads.values()) > _DISTURBED:
        print("note: something else was at work; leave the machine alone and measure again")
