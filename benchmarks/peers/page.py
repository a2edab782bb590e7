"""Write docs/peers.md from the record of a run."""

from __future__ import annotations

from typing import Any

SHOWN = {
    "crisp": "CRISP (`lru`, granularity block)",
    "llama.cpp": "llama.cpp, mmap",
    "accelerate": "transformers, accelerate's disk offload",
    "transformers": "transformers, all in memory, no cap",
}


def page(content: dict[str, Any]) -> str:
    """Return the text of docs/peers.md."""
    told, results = content["conditions"], content["results"]
    shares = sorted({r["share"] for r in results if r["share"] is not None})
    names = list(dict.fromkeys(r["contestant"] for r in results))
    found = {(r["contestant"], r["share"]): r for r in results}
    versions = ", ".join(f"{name} {number}" for name, number in told["versions"].items())
    bases = ", ".join(f"{SHOWN[name]} {n / 1e6:.0f} MB" for name, n in told["bases"].items())
    lines = [
        "# CRISP and others under one memory cap",
        "",
        f"Written by `make peers`: {told['date']}, {told['processor']}, {told['cores']} cores,",
        f"Linux {told['kernel']}; {versions}.",
        "A random-weight Mixtral shape (d 1024, d_ff 3584, 12 layers, 8 experts, top-2, bf16):",
        f"{told['expert_bytes'] / 1e9:.2f} GB of experts, {told['token_bytes'] / 1e6:.0f} MB used",
        f"by a token; greedy decoding after a prompt of 64 tokens, {told['tokens']} tokens or",
        f"{told['seconds']:.0f} s, {told['threads']} threads that compute, each contestant alone",
        f"and from cold caches in a memory cgroup (v{told['cgroup']}) that counts the page cache.",
        "The cap is what the contestant's process takes without experts (its own memory, code, all",
        f"other weights), the share of the experts' bytes, and {told['slack'] / 1e6:.0f} MB.",
        f"Without experts: {bases} (accelerate's with one whole layer, which it loads at once).",
        "CRISP's budget is the share, and one of its threads reads; accelerate keeps that share of",
        "the layers in memory; llama.cpp leaves it to the page cache. One run of each cell.",
        "",
        "Tokens a second (and the cap):",
        "",
        "| | " + " | ".join(f"{share:.0%} of the experts fit" for share in shares) + " | no cap |",
        "|---" * (len(shares) + 2) + "|",
    ]
    for name in names:
        cells = [_cell(found.get((name, share))) for share in (*shares, None)]
        lines.append(f"| {SHOWN[name]} | " + " | ".join(cells) + " |")
    lines += ["", *_verdicts(found, shares), *_agreement(found, shares), *_distance(found, told)]
    return "\n".join(lines) + "\n"


def _rate(result: dict[str, Any] | None) -> float | None:
    if result is None or "failed" in result or not result["tokens"]:
        return None
    return float(result["tokens"] / result["seconds"])


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    rate = _rate(result)
    told = f"{rate:.2f}" if rate is not None else str(result.get("failed", "no token in time"))
    return told if result["cap"] is None else f"{told} ({result['cap'] / 1e6:.0f} MB)"


def _verdicts(found: dict[Any, Any], shares: list[float]) -> list[str]:
    lines = []
    for share in shares:
        own = _rate(found.get(("crisp", share)))
        others = {
            name: rate
            for name in ("llama.cpp", "accelerate")
            if (rate := _rate(found.get((name, share)))) is not None
        }
        if own is None or not others:
            lines.append(f"- At {share:.0%}: nothing to compare.")
            continue
        best = max(others, key=others.__getitem__)
        lines.append(
            f"- At {share:.0%}: {own / others[best]:.2f} times the best of the others, {best}."
        )
    aims = "Aims: 2 times at the tightest cap, not slower at 50 %."
    return [*lines, "", aims]


def _agreement(found: dict[Any, Any], shares: list[float]) -> list[str]:
    """Say how many tokens CRISP and llama.cpp write alike; their arithmetic rounds differently."""
    own, other = (
        found.get((name, shares[-1]), {}).get("ids", []) for name in ("crisp", "llama.cpp")
    )
    same = 0
    for a, b in zip(own, other, strict=False):
        if a != b:
            break
        same += 1
    return ["", f"CRISP and llama.cpp write the same first {same} of {min(len(own), len(other))} "
            "tokens (random weights leave small margins)."]  # fmt: skip


def _distance(found: dict[Any, Any], told: dict[str, Any]) -> list[str]:
    """Say how fast each reads its experts from memory at 100 %, where nothing is loaded."""
    lines = ["", "With everything resident computing decides, experts and all else together:", ""]
    for name in ("crisp", "llama.cpp", "transformers"):
        rate = _rate(found.get((name, None if name == "transformers" else 1.0)))
        if rate is not None:
            lines.append(
                f"- {SHOWN[name]}: {rate * told['token_bytes'] / 1e9:.1f} GB/s of expert weights "
                f"at {rate:.2f} tokens/s."
            )
    return lines
