"""What ``crisp tune`` prints: the policies that are worth it, and the command that runs one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from textwrap import wrap

from crisp.cli.output.columns import align_columns, format_numbers
from crisp.policy.policy import NAMED
from crisp.profile.loss_curve import POLICY
from crisp.run.setup import Setup
from crisp.sim.tuning.candidates import TunedPolicy, Tuning, cost_of
from crisp.sim.tuning.loss_conditions import loss_conditions
from crisp.sim.tuning.losses import Loss, Losses
from crisp.sim.tuning.promised import TunedBudget

_COLUMNS = (
    ("MB/token", "decode_bytes_per_token", 1e-6),
    ("J/token", "decode_energy_j_per_token", 1.0),
    ("ms/token", "ms_per_token_mean", 1.0),
)
_WIDTH = 100


def describe_losses(setup: Setup, losses: Losses, file: str) -> list[str]:
    """Return lines for the title: how losses were measured, and what differs."""
    return [
        line
        for number, text in enumerate(loss_conditions(setup, losses, file))
        for line in wrap(
            text, _WIDTH, initial_indent=f"{'' if number else 'losses':<10}",
            subsequent_indent=" " * 10, break_on_hyphens=False,
        )
    ]  # fmt: skip


def format_report(tuning: Tuning, most: str, limit: float, minimise: str) -> list[str]:
    """Return the front as a table, its best policy marked, and what has to be said below.

    most: the limit of the loss, as it was spelled.
    """
    best, front = tuning.best(limit), tuning.front
    full = cost_of(tuning.reference.run, minimise)
    policies = [point.run.settings["policy"] for point in front]
    cells = [
        ["*" if point is best else "" for point in front],
        *(
            [str(policy[part]) for policy in policies]
            for part in ("name", "width", "cache", "unit", "order")
        ),
        format_numbers([100 * point.loss.loss for point in front], 1),
        [_format_range(point.loss) for point in front],
    ]
    for _, name, factor in _COLUMNS:
        values = [point.run.metrics[name] for point in front]
        cells.append(format_numbers([None if v is None else v * factor for v in values]))
    shares = [100 * cost_of(point.run, minimise) / full if full else None for point in front]
    cells.append(format_numbers(shares, 1))
    headings = ["", "policy", "width", "cache", "unit", "order", "loss %", "range"]
    headings += [heading for heading, _, _ in _COLUMNS]
    notes = [
        f"*: the least {minimise} a token within a loss of {most}; of {tuning.tried} policies "
        "tried none beats those above",
        f"loss: increase of perplexity, measured; of full: of the {minimise} of full widths "
        "at their best",
    ]
    if best.loss.interval is not None and best.loss.interval[1] > limit:
        notes.append(f"*: its loss may be above {most}: the range, 95 %, goes beyond")
    notes += tuning.notes
    return [
        *align_columns([*headings, "of full %"], cells, text=6),
        "",
        *(line for note in notes for line in _wrapped(note)),
    ]


def format_command(
    policy: TunedPolicy, trace: str, budget: str, given: Mapping[str, object]
) -> str:
    """Return the command that runs it; given: the other options, None where they were not given."""
    parts = policy.run.settings["policy"]
    options: dict[str, object] = {"--policy": parts["name"], "--budget": budget}
    options |= {
        f"--{part}": parts[part]
        for part in ("width", "order", "cache", "scope", "unit", "prefetch")
    }
    rescale = parts.get("rescale", "none")
    if rescale != NAMED[parts["name"]].rescale:
        options["--rescale"] = rescale
    if "magnitude" in parts:
        options["--magnitude"] = parts["magnitude"]
    words = [
        str(word)
        for option in (*options.items(), *given.items())
        if option[1] is not None
        for word in option
    ]
    return shlex.join(["crisp", "simulate", trace, *words])


def format_promised(tuned: Sequence[TunedBudget], minimise: str) -> list[str]:
    """Return the best of each budget as a table, and what has to be said below."""
    runs = [one.best for one in tuned]
    policies = [run.settings["policy"] for run in runs]
    cells = [
        ["*" if one is cheapest(tuned, minimise) else "" for one in tuned],
        [one.budget.text for one in tuned],
        *([str(policy[part]) for policy in policies] for part in ("name", "width", "order")),
        [str(run.settings["granularity"]) for run in runs],
    ]
    for _, name, factor in _COLUMNS:
        values = [run.metrics[name] for run in runs]
        cells.append(format_numbers([None if v is None else v * factor for v in values]))
    takes = [(cost_of(one.best, minimise), cost_of(one.full, minimise)) for one in tuned]
    cells.append(format_numbers([100 * own / full if full else None for own, full in takes], 1))
    headings = ["", "budget", "policy", "width", "order", "granularity"]
    headings += [heading for heading, _, _ in _COLUMNS]
    notes = [
        f"*: the least {minimise} a token; in each budget {tuned[0].tried} rules and settings were "
        "tried",
        f"of full: of the {minimise} of the best that loses nothing",
    ]
    return [*align_columns([*headings, "of full %"], cells, text=6), "", *notes]


def cheapest(tuned: Sequence[TunedBudget], minimise: str) -> TunedBudget:
    """Return the budget whose best takes least."""
    return min(tuned, key=lambda one: cost_of(one.best, minimise))


def format_promised_command(
    tuned: Sequence[TunedBudget], minimise: str, trace: str, given: Mapping[str, object]
) -> str:
    """Return the command that runs the best of all; given: as in `format_command`."""
    one = cheapest(tuned, minimise)
    parts = one.best.settings["policy"]
    granularity = one.best.settings["granularity"]
    options: dict[str, object] = {"--policy": parts["name"], "--budget": one.budget.text}
    options |= {f"--{part}": parts[part] for part in ("order", "unit")}
    rest = {**given, "--granularity": granularity}
    if parts["name"] != POLICY:
        rest.pop("--loss")
    words = [
        str(word)
        for option in (*options.items(), *rest.items())
        if option[1] is not None
        for word in option
    ]
    return shlex.join(["crisp", "simulate", trace, *words])


def _format_range(loss: Loss) -> str:
    if loss.interval is None:
        return ""
    low, high = (100 * end for end in loss.interval)
    return f"{low:.1f} to {high:.1f}"


def _wrapped(note: str) -> list[str]:
    return wrap(note, _WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False)
