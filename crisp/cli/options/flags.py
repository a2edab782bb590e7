"""Flags that several commands take, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crisp.extensions import load_file

LISTS = "A list such as fo,lru gives a table."


def file(help: str) -> typer.models.OptionInfo:
    """Return an option that names a file to write, or standard output."""
    option: typer.models.OptionInfo = typer.Option(metavar="FILE", help=f"{help}; -: print it.")
    return option


def _choice(help: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=help)
    return option


def _load_plugins(files: list[Path] | None) -> list[Path] | None:
    """Load plugin files before anything else is looked at."""
    for path in files or ():
        load_file(path)
    return files


Plugin = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        is_eager=True,
        callback=_load_plugins,
        help="Python that adds names, see docs/extending.md; may be given again.",
    ),
]
Trace = Annotated[
    str,
    typer.Argument(metavar="TRACE", help="A routing trace: a file, or the name of a bundled one."),
]
ProfileTrace = Annotated[
    str | None,
    typer.Option(metavar="TRACE", help="Count combinations here, and run all of TRACE."),
]
MetadataFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A prepared model's crisp.safetensors, in place of --profile."
    ),
]
WIDTHS = (
    "full, uniform(.5), single, tiered(alpha=.6,beta=.9), skip(.5), skip-contribution(.5), "
    "drop(.25), contribution(.75), contribution-resident(.75), saliency(.5), resident(.5) or "
    "solver(.02)."
)
POLICIES = (
    "fo, lru, mo, up, crisp, em (EdgeMoE), drop (rare experts), contribution, "
    "contribution-resident or saliency (blocks that are worth it)."
)
Width = Annotated[str | None, _choice(WIDTHS)]
Order = Annotated[
    str | None,
    _choice("sequential, fifo, random(SEED), widest, narrowest, resident-first or johnson."),
]
Cache = Annotated[
    str | None,
    _choice(
        "none, static, lru, lfu, lfu-in-cache, fifo, slru, lfru, least-stale, random(SEED), "
        "tier-aware; by block saliency, suffix-lru, suffix-lfu; oracles: belady, belady-blocks, "
        "belady-forced."
    ),
]
Scope = Annotated[str, _choice("Of the cache: layer or global.")]
Unit = Annotated[
    str | None,
    _choice("What is admitted, evicted: expert or block.  [default: the policy's, mostly expert]"),
]
Granularity = Annotated[str, _choice("What must have arrived to compute: expert or block.")]
Prefetch = Annotated[
    str | None,
    _choice(
        "none, previous, guess, frequent or, an oracle, perfect; saliency(guess) and its like: of "
        "what is predicted so, what is worth loading."
    ),
]
Rescale = Annotated[
    str | None,
    _choice(
        "What is executed of an expert stands for all of it: none, or measured by prepare.  "
        "[default: the policy's]"
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Of policy saliency: what it may cost in perplexity, such as 2%, in the place of its "
        "threshold; needs the --metadata of crisp prepare --loss-curve.",
    ),
]
Routing = Annotated[
    str | None,
    _choice(
        "Which experts a token uses, from the router's scores and what is resident: router (its "
        "own), cache-prior(.5), substitute(.5) or skip-missing(1).  [default: the policy's]"
    ),
]
Magnitude = Annotated[
    str,
    _choice(
        "Of an expert's output for this token, beside its mean, in the widths: none, or predicted "
        "from the layer's input (prepare --magnitudes)."
    ),
]
Phase = Annotated[str, _choice("decode, prefill or all.")]
Batch = Annotated[int, _choice("Sequences that decode side by side.")]
Chunk = Annotated[
    str, _choice("Prompt tokens of one prefill step; whole: all, so that an expert is loaded once.")
]
TopK = Annotated[int | None, _choice("The trace's k, where it is not the model's.")]
Layers = Annotated[int | None, _choice("Run the first layers of the trace only.")]
Seed = Annotated[int, _choice("Of what is random.")]
Limit = Annotated[int | None, _choice("Run the first rows only.")]
Engine = Annotated[
    str,
    _choice("simpy, or fast: compiled, the same figures; no timeline, unified memory or oracles."),
]
Timeline = Annotated[str | None, file("Every interval, as parquet")]
Perfetto = Annotated[str | None, file("The timeline, for ui.perfetto.dev")]
Plot = Annotated[str | None, file("A picture of some events: .png, .pdf or .svg")]

# Of commands that run on a device
StoreFolder = Annotated[Path, typer.Option(metavar="STORE", help="The expert store; see pack.")]
Device = Annotated[
    str, _choice("cpu: from disk into memory; cuda: to a GPU; unified: within a Jetson's memory.")
]
Threads = Annotated[
    int | None, _choice("cpu: threads that compute; one on each core unless told otherwise.")
]
LinkLimit = Annotated[
    str | None, _choice("cpu: slow the link down to so many bytes a second, such as 200MB/s.")
]
Verify = Annotated[bool, typer.Option("--verify", help="cpu: check every block against its hash.")]
HostLimit = Annotated[
    str | None,
    _choice("cuda: host memory for a copy of the weights, such as 16GB; more: from disk."),
]
LoadsFrom = Annotated[
    str | None, _choice("unified: memory, mapped or disk.  [default: the fastest, measured]")
]
Read = Annotated[
    str,
    _choice(
        "cpu: direct: past the system's page cache; buffered: through it, so that spare memory "
        "caches what was read; uncached: through it, but nothing stays there."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything but the device, and run nothing.")
]
ModelledEnergy = Annotated[
    bool,
    typer.Option(
        "--modelled-energy", help="Joules from --hardware's power figures, instead of a meter."
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Run so often: means of all, with 95 % intervals.  [default: 1]"
    ),
]
EnergyWithin = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Repeat until the 95 % interval of J/token is +- this share of it, such as 5%.",
    ),
]
EnergyRepeats = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Runs for it at most; alone: run so often.  [default: 20 with a share, else 1]",
    ),
]
