"""The words of docs/logs.md."""

HEAD = """\
# Logs of other engines

What other engines log of their routing can be run here: `crisp trace import` makes a trace of it,
and `crisp diagnose LOG --engine NAME` says why that engine loads so much: by its policy, or because
the working set does not fit. This page is made, with [logs.json](logs.json) (every figure), by

    python benchmarks/logs --data DIR     (make logs)

`DIR/logs/bigmoeonedge` holds route traces, metrics and replay curves of BigMoeOnEdge (Apache-2.0,
github.com/Helldez/BigMoeOnEdge at 2d4f2b1, docs/bench-data), which are not distributed with the
project.
"""

IMPORTS = """\
## Logs imported

`fixtures` are 40 tokens of one real trace, rewritten by hand in the layouts of other engines, so
that the truth is known; the others were written by these engines. Each is recognised by its
content ([traces.md](traces.md) has the formats).
"""

REPRODUCED = """\
## One engine, reproduced

BigMoeOnEdge ran three models on a phone, with unbuffered reads, and published the route trace and
the metrics of the same run. From the trace alone the rule that its source states
([below](#engines)) gives what the engine printed:
"""

EQUAL = """\
*Rates*: the cumulative hit rate after each decoded token, two decimals as printed. *Flags*: whether
each expert of each decoded token was found. *Curve*: hit rates, of all lookups and of decoded
tokens, and MiB read, of its own replay of the same traces with five rules at eleven budgets, as
printed. Bytes are as near as a trace allows: each matrix of an expert is read in whole pages of
4,096 bytes, which is one page more than the matrix on average, and where it begins within a page
the trace does not say.
"""

CURVES = """\
The curves, as hit rates of decoded tokens in percent; all {cells} cells equal the published ones.
`lru` is the engine's own rule. `layer` and `layerlfu` divide the budget by the layers, and keep at
least what a layer used last, also where that is more than its part.
"""

READINGS = """\
### What a wrong reading gives

The same traces, read a little differently. llama.cpp evaluates a prompt's last layer for its last
token only, so the other tokens lack a layer in two of the logs (gemma's is recorded whole), and an
importer that drops incomplete tokens keeps that one. It must take what has no record as absent
instead, a prompt as one call a layer, and each layer's own size.
"""

TIMES = """\
### Time

A token's time is waiting for reads (stall and management) and computing. Waiting is fitted to the
first half of the decoded tokens as base + slope × MiB read, by least squares; computing is taken as
the mean of the first half. *Error*: how much longer the second half took, on average, than
foretold; *typical*: the median error of a single token. ms a token:
"""

OTHERS = """\
## The same routing by other engines' rules

Decoded tokens, each log at its own budget. Where an engine only counts otherwise (`colibri` asks
for each token of a prompt, `llama.cpp-mmap` for each tensor), its rates are of its own lookups.
"""

DIAGNOSES = """\
## The three logs diagnosed

Each with the budget it was recorded with. *hits %* is of all lookups, those of prompts too, as
engines print it; *decode %* of those of decoded tokens; MiB, loads and ms are of one decoded token.
Of what it loads, *first uses* are loaded by any cache, *the working set* by the best cache of this
size as well, and the rest is *the policy*'s. `phone.toml` is in benchmarks/logs: it has the
storage's speed from the fit above (2.92 GB/s), and nothing else that is used.
"""

ENGINES = """\
## Engines

The rules that `--engine` knows. A *call* is one layer of one forward pass: of one decoded token, or
of all of a prompt's. What is not said in the sources as they were read, or is simplified, stands
under *assumed*. All start with an empty cache and admit every miss.
"""

RULES = """\
- **lru**: the least recently used goes. **lfu**: the one looked up least since the start. **hot**:
  the same, with counts halved every 16 decoded tokens. **heat**: what was hit at most four times in
  this stay, by last use, then the rest. Ties: the least recently used.
- *after the call*: a call may exceed the budget and gives back at its end. *at each miss*: room is
  made before reading. *protects*: nothing that the call uses is evicted; what then finds no room is
  read and not kept.
- *expert*: each distinct expert of a call is looked up once; a duplicate only makes it more recent.
  *row*: each token of a prompt looks up its own. *tensor*: each matrix of an expert for itself.
- Sequences follow one another, as if the engine served one at a time, in one cache.

The best cache in a diagnosis evicts, after each call, what is used furthest in the future, and may
let go what was just used. Where all experts have one size no cache loads less (Belady, 1966); where
sizes differ by layer, none is known that does, and finding the least is hard.

CRISP's own caches obey the execution contract ([contract.md](contract.md)): whole slots, as many in
each layer, and what finds no room is used and not kept. `static` and `tier-aware` count the first
prompt, or the first tenth of a log that begins with none; what `static` holds from the start is not
counted as loaded.
"""
