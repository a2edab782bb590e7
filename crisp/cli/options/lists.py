"""Lists in options: ``fo,lru,crisp``."""

from __future__ import annotations

import re

from crisp.errors import CrispError


def split_list(text: str, option: str) -> list[str]:
    """Return the items between commas; commas inside parentheses do not split.

    Raises CrispError, naming ``option``, for an empty item or parentheses that do not match.

    >>> split_list("fo, tiered(alpha=.6,beta=.9)", "--policy")
    ['fo', 'tiered(alpha=.6,beta=.9)']
    """
    items, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    if depth:
        raise CrispError(f"{option} '{text}': the parentheses do not match")
    items = [item.strip() for item in items]
    if not all(items):
        raise CrispError(f"{option} '{text}': an item of the list is empty")
    return items


def check_one(text: str | None, option: str) -> None:
    """Raise CrispError, naming ``option``, for a list where only `crisp sweep` takes one."""
    if text is not None and "," in re.sub(r"\([^()]*\)", "", text):
        raise CrispError(
            f"{option} '{text}': expected one; a list of them goes to crisp sweep {option}"
        )
