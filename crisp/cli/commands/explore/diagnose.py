"""``crisp diagnose``: whether an engine loads what it does by its policy or by its working set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from crisp.cli.options import flags

if TYPE_CHECKING:
    from crisp.diagnose.diagnosis import LogDiagnosis, Setting
    from crisp.diagnose.reads import Cost

_MIB = 1 << 20
_SHOWN = {"cache": 5, "memory": 5, "width": 4}  # settings of each kind, the best ones


def diagnose(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG", help="A log of another engine, a routing trace, or a bundled one's name."
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="bigmoeonedge, llama.cpp-mmap, llama.cpp-moe-cache, colibri, colibri-lfru, omlx, "
            "moe-infinity or ds4.  [default: the one that wrote the log]",
        ),
    ] = None,
    budget: Annotated[str, typer.Option(help="Memory for routed experts: 10%, .1 or 4GB.")] = "20%",
    hardware: Annotated[
        str | None, typer.Option(help="For ms a token: a machine's profile, by name or as a .toml.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="For logs that do not say it: a built-in model, config.json or store."),
    ] = None,
    bits: Annotated[
        str | None, typer.Option(help="Stored bits of a routed weight.  [default: as published]")
    ] = None,
    top_k: flags.TopK = None,
    html: Annotated[str | None, flags.file("One page with tables and pictures")] = None,
    json: Annotated[str | None, flags.file("All figures")] = None,
) -> None:
    """Say why an engine loads so much: by its policy, or by its working set.

    Its own rule is replayed on its log, beside the best cache of the same size, other caches, other
    budgets and narrower experts.
    """
    import sys

    from crisp.cli.options.files import STDOUT, check_outputs
    from crisp.cli.options.logs import load_logged_run
    from crisp.cli.output.progress import progress
    from crisp.cli.output.words import printable
    from crisp.diagnose.contracts import contract_of
    from crisp.diagnose.investigation import diagnose, steps
    from crisp.policy import Budget
    from crisp.sim.hardware import hardware_profile

    check_outputs({"--html": html, "--json": json}, [("LOG", log), ("--hardware", hardware)])
    machine = None if hardware is None else hardware_profile(hardware)
    run, wrote = load_logged_run(log, model, bits, top_k)
    contract = contract_of(_engine(engine, wrote, log))
    pictures = html is not None or json is not None
    with progress("replays", steps(run, contract, pictures)) as advance:
        found = diagnose(
            run,
            contract,
            Budget.parse(budget),
            machine,
            curves=pictures,
            progress=lambda: advance(1),
        )
    texts = _outputs(found, html, json)
    shown = sys.stderr if STDOUT in (html, json) else sys.stdout
    print("\n".join(map(printable, lines(found))), file=shown)
    for name, text in texts.items():
        _write(name, text)


def _engine(asked: str | None, wrote: str | None, log: str) -> str:
    """Return the engine whose rule is replayed; CrispError where nothing says which."""
    from crisp.diagnose.contracts import CONTRACTS
    from crisp.errors import CrispError

    if asked is not None:
        return asked
    if wrote in CONTRACTS:
        return str(wrote)
    own = [name for name in CONTRACTS if wrote is not None and name.startswith(wrote)]
    ways = f"{wrote} keeps experts in several ways: " if own else ""
    raise CrispError(f"{log}: {ways}give the engine, --engine {'|'.join(own or CONTRACTS)}")


def _outputs(found: LogDiagnosis, html: str | None, json: str | None) -> dict[str, str]:
    """Return the text of each file that was asked for."""
    import dataclasses
    from json import dumps

    from crisp.diagnose.page import render_page

    texts = {}
    if html is not None:
        texts[html] = render_page(found, lines(found))
    if json is not None:
        content = dataclasses.asdict(found)
        content |= {"parts": found.parts, "verdict": found.verdict}
        texts[json] = dumps(content, indent=1, allow_nan=False) + "\n"
    return texts


def _write(name: str, text: str) -> None:
    import sys

    from crisp.cli.options.files import STDOUT
    from crisp.files import atomic

    if name == STDOUT:
        sys.stdout.write(text)
        return
    with atomic(name) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"{name}: written", file=sys.stderr)


def lines(found: LogDiagnosis) -> list[str]:
    """Return the diagnosis in a screenful."""
    from textwrap import wrap

    parts = (_conditions, _figures, _verdict, _settings, _helpful)
    out = [line for part in parts for line in (*part(found), "")]
    said = [*(f"assumed: {text}" for text in found.contract.assumptions), *found.notes]
    if found.contract.counting.lookups == "tensor":
        said.insert(0, "loads: of single matrices by its rule, of whole experts by other caches")
    out += [part for line in said for part in wrap(line, 100, subsequent_indent="  ")]
    return out if said else out[:-1]


def _conditions(found: LogDiagnosis) -> list[str]:
    """Return what every figure below depends on, a line each."""
    from crisp.units import format_count

    least, most = found.expert_bytes
    size = _mib(least) if least == most else f"{_mib(least)} to {_mib(most)}"
    share = 100 * found.budget_bytes / found.total_bytes
    said = {
        "log": f"{found.log}: {format_count(found.prompt_tokens, 'prompt token')}, "
        f"{found.tokens:,} decoded; {found.model or 'an unnamed model'}",
        "experts": f"{found.layers} layers x {found.experts}, top-{found.top_k}, {size} MiB each, "
        f"{_mib(found.total_bytes)} MiB in all",
        "rule": f"{found.contract.name}: {found.contract.title}",
        "budget": f"{found.budget}: {_mib(found.budget_bytes)} MiB, {share:.1f} % of all experts",
    }
    if found.windows:
        said["budget"] += f", {found.budget_bytes / found.windows[0][1]:.1f} tokens' worth"
    if found.machine is not None:
        said["machine"] = f"{found.machine}; ms are of loads alone, one after the other"
    return [f"{key:<9}{text}" for key, text in said.items()]


def _figures(found: LogDiagnosis) -> list[str]:
    """Return the engine's rule beside the best and the worst, as a table."""
    rows = {
        "by its rule": found.own,
        "by the best cache of this size": found.best,
        "with nothing kept": found.uncached,
    }
    cells = [
        [name, _percent(c.hit_rate), _percent(c.decode_hit_rate), *_per_token(c, found)]
        for name, c in rows.items()
    ]
    return _table(["", "hits %", "decode %", *_heads(found)], cells)


def _verdict(found: LogDiagnosis) -> list[str]:
    """Return the answer: the policy or the working set, and what can be done about the policy."""
    parts, own = found.parts, found.own.bytes_per_token
    if not own:
        return ["Is it the policy or the working set?  Neither: nothing is loaded."]
    shares = ", ".join(f"{name} {100 * part / own:.0f} %" for name, part in parts.items())
    saved = 100 * found.saved_without_foresight
    windows = ", ".join(str(n) for n, _ in found.windows)
    sizes = ", ".join(f"{size / _MIB:,.0f}" for _, size in found.windows)
    return [
        f"Is it the policy or the working set?  {found.answer}.",
        f"Of what a token loads: {shares}.",
        f"Without foresight, the best cache tried saves {saved:.0f} % of the policy's part"
        + ("." if saved >= 50 else ": the rest takes foresight."),
        *([f"Distinct experts of {windows} tokens in a row: {sizes} MiB."] if sizes else []),
    ]


def _settings(found: LogDiagnosis) -> list[str]:
    """Return what else could be set, as a table: the best few of each kind."""
    own = found.own.bytes_per_token
    cells = []
    for kind, most in _SHOWN.items():
        of_kind = [setting for setting in found.settings if setting.kind == kind]
        of_kind.sort(key=lambda setting: setting.cost.bytes_per_token)
        for setting in of_kind[:most]:
            cost = setting.cost
            change = f"{100 * (cost.bytes_per_token / own - 1):+.0f}" if own else ""
            name = setting.name + (" *" if setting.loses_quality else "")
            hits = _percent(cost.decode_hit_rate)
            cells.append([kind, name, hits, *_per_token(cost, found), change])
    heads = ["set", "to", "decode %", *_heads(found), "change %"]
    loses = "* executes less of some experts, which loses quality: how much, crisp eval measures"
    return [*_table(heads, cells, text=2), loses]


def _helpful(found: LogDiagnosis) -> list[str]:
    """Return the settings that help most, one of each kind."""
    helpful = found.most_helpful()
    if not helpful:
        return ["Nothing tried loads less than the engine's own rule."]
    return [
        "Most help, one of each kind:",
        *(f"{n}. {_gain(setting, found)}" for n, setting in enumerate(helpful, 1)),
    ]


def _gain(setting: Setting, found: LogDiagnosis) -> str:
    cost, own = setting.cost, found.own
    text = f"{setting.kind} {setting.name}: {_mib(own.bytes_per_token)} -> "
    text += f"{_mib(cost.bytes_per_token)} MiB"
    if cost.load_ms_per_token is not None and own.load_ms_per_token is not None:
        text += f", {own.load_ms_per_token:.1f} -> {cost.load_ms_per_token:.1f} ms"
    return f"{text} a token" + (", at a loss of quality" if setting.loses_quality else "")


def _heads(found: LogDiagnosis) -> list[str]:
    return ["MiB a token", "loads"] + ([] if found.machine is None else ["ms"])


def _per_token(cost: Cost, found: LogDiagnosis) -> list[str]:
    cells = [f"{cost.bytes_per_token / _MIB:,.2f}", f"{cost.loads_per_token:,.1f}"]
    return cells if found.machine is None else [*cells, f"{cost.load_ms_per_token or 0:,.2f}"]


def _table(heads: Sequence[str], cells: Sequence[Sequence[str]], text: int = 1) -> list[str]:
    from crisp.cli.output.columns import align_columns

    return align_columns(heads, [list(column) for column in zip(*cells, strict=True)], text)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / _MIB:,.1f}" if n_bytes < 1000 * _MIB else f"{n_bytes / _MIB:,.0f}"
