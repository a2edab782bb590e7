"""The generated part of docs/models.md: family by family, which commands work."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.models.trial import COMMANDS, Trial

PAGE = "docs/models.md"
BEGIN, END = "<!-- families: made by make models -->", "<!-- families: end -->"


def render(trials: Sequence[Trial]) -> str:
    """Return the part of the page between its markers."""
    ordered = sorted((x for x in trials if not x.untried), key=lambda trial: trial.model_type)
    untried = sorted((x for x in trials if x.untried), key=lambda trial: trial.model_type)
    complete = sum(trial.complete for trial in ordered)
    lines = [
        f"Of {len(ordered)} families with routed experts, {complete} go the whole way.",
        "",
        f"| model_type | experts | {' | '.join(COMMANDS)} |",
        f"|---|---|{'---|' * len(COMMANDS)}",
    ]
    for trial in ordered:
        cells = ["no" if command in trial.refusals else "yes" for command in COMMANDS]
        lines.append(f"| {trial.model_type} | {trial.layout} | {' | '.join(cells)} |")
    refused = [trial for trial in ordered if not trial.complete]
    if refused:
        lines += ["", "Why not:", ""]
    for trial in refused:
        for reason in dict.fromkeys(trial.refusals.values()):
            commands = [name for name, why in trial.refusals.items() if why == reason]
            lines.append(f"- {trial.model_type}, {', '.join(commands)}: {reason}")
    if untried:
        lines += [
            "",
            "Of these no small model could be made, and nothing was run. By their modules, without "
            "weights, commands admit or refuse a model; where no reason stands, it is admitted:",
            "",
            "| model_type | experts | refused, because |",
            "|---|---|---|",
        ]
        for trial in untried:
            reasons = "; ".join(dict.fromkeys(trial.refusals.values()))
            lines.append(f"| {trial.model_type} | {trial.layout} | {reasons} |")
    return "\n".join([*lines, ""])


def insert(page: str, part: str) -> str:
    """Return a page with another part between its markers, which are appended if not there."""
    if BEGIN not in page:
        return f"{page.rstrip()}\n\n{BEGIN}\n{part}{END}\n"
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{part}{END}{rest.partition(END)[2]}"


def between(page: str) -> str:
    """Return what stands between the markers of a page."""
    return page.partition(f"{BEGIN}\n")[2].partition(END)[0]
