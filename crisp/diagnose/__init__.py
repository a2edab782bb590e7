"""Why another engine loads what it loads: its own rule replayed on its log, beside other rules.

    log = read_log([Path("gptoss.route.csv")])
    calls = Calls.from_trace(log.trace, log.expert_bytes)
    replay(calls, CONTRACTS["bigmoeonedge"].policy, 3000 << 20)

`crisp.diagnose.calls` lays a trace out as the layer calls that an engine makes, `contracts` says by
which rule each engine caches and how it counts, `replay` runs one rule in a budget of bytes,
`others` runs CRISP's own caches and widths on the same routing, `investigation` runs all of it, and
`diagnosis` draws the conclusion: is it the policy, or the working set.
"""
