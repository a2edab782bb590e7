"""A page in headless Chromium, without a driver: a script in a copy of it says what it saw."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--window-size=1400,1000",
)  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """The program; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no chromium here")
    return found


def seen(page: str, look: str, folder: Path) -> Any:
    """What a script returns that runs after the page's own; no error may reach the console.

    look: the body of a function, whose value is safe for JSON.
    """
    look = (
        f"const seen = (() => {{{look}}})();\n"
        'const box = document.createElement("pre"); box.id = "seen";\n'
        "box.textContent = JSON.stringify(seen); document.body.append(box);"
    )
    digest = base64.b64encode(hashlib.sha256(look.encode()).digest()).decode()
    page = page.replace("script-src '", f"script-src 'sha256-{digest}' '", 1)
    page = page.replace("</body>", f"<script>{look}</script></body>")
    file = folder / "seen.html"
    file.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [chromium(), *FLAGS, f"--user-data-dir={folder / 'user'}", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert not said, "\n".join(said)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(html.unescape(found[1]))
