"""The page of a diagnosis: one self-contained file, without a script and with nothing to fetch.

All texts of the log are escaped. The pictures are SVG; the same diagnosis gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from crisp.diagnose.diagnosis import LogDiagnosis
from crisp.diagnose.pictures import draw_causes, draw_curves, draw_settings
from crisp.version import TOOL

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
.picture {{ background: #fff; border-radius: 6px; padding: .6rem; max-width: 46rem; }}
.picture text {{ fill: #1b1f24; }}
pre {{ overflow-x: auto; font-size: .82rem; line-height: 1.4; }}
</style>
</head>
<body>
<header>
<p class="eyebrow">CRISP diagnosis</p>
<h1>{title}</h1>
<p class="lead">{lead}</p>
</header>
<main>
{sections}
</main>
<footer>{footer}</footer>
</body>
</html>
"""


def render_page(found: LogDiagnosis, text: Sequence[str]) -> str:
    """Return the page's HTML; text: the diagnosis as lines, which the page also shows."""
    pictures = (
        ("What memory would do", "By the engine's rule, by the best cache, and by others.",
         draw_curves),
        ("Why it is loaded", "First uses, the working set that does not fit, and what the policy "
         "lets go too soon.", draw_causes),
        ("What else could be set", "At the same budget, unless it says otherwise.", draw_settings),
    )  # fmt: skip
    sections = [
        f"<section>\n<h2>In figures</h2>\n<pre>{escape(chr(10).join(text))}</pre>\n</section>"
    ]
    for title, caption, draw in pictures:
        sections.append(
            f'<section>\n<h2>{escape(title)}</h2>\n<p class="note">{escape(caption)}</p>\n'
            f'<div class="picture">{_svg(draw(found))}</div>\n</section>'
        )
    return _PAGE.format(
        title=escape(f"{found.contract.name} on {found.log}"),
        style=files("crisp.report").joinpath("assets", "page.css").read_text(encoding="utf-8"),
        lead=escape(
            f"{found.answer}: {found.own.bytes_per_token / (1 << 20):,.1f} MiB a token, "
            f"{found.best.bytes_per_token / (1 << 20):,.1f} by the best cache of "
            f"{found.budget_bytes / (1 << 20):,.0f} MiB."
        ),
        sections="\n".join(sections),
        footer=escape(f"Made by {TOOL} from {found.log}. Contract: {found.contract.source}."),
    )


def _svg(text: str) -> str:
    """Return the picture without what belongs to a file of its own."""
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r"^.*?(?=<svg)", "", text, flags=re.DOTALL)
