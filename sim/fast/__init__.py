"""The event scheduler and its two streams over flat arrays, compiled: what
`crisp.sim.fast_simulate` and `crisp.sim.fast_replay` run.

Each module restates one of crisp's over arrays: residency, look-ahead, scheduler. The rules that
decide (whom to evict, what is kept, how tasks are ranked) are crisp's own functions, compiled.
"""
