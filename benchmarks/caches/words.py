"""The words of the page."""

HEAD = """\
# Caches, prefetchers and orders

One thing varied at a time. One command makes this page, its picture and [caches.json](caches.json)
(every figure):

    python benchmarks/caches --data DIR     (make caches)

`DIR/traces` holds gpt-oss-20b's routing (answers to MMLU and GPQA, top-4 of 32 experts in 24
layers), of which 8,000 tokens are run. It is a subset, of 94 answers, of
AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting on Hugging Face (Apache-2.0) and is not distributed
with the project: the command imports it as the long table that it is, as
`crisp trace import TABLE --model gpt-oss-20b --out FILE` does. The other traces come with the
project. It takes some three minutes on two cores. Decode, one sequence at a time unless said
otherwise. The first half of each trace counts the profile that `static`, `tier-aware`, `frequent`
and the widths of `crisp` go by; the rest is run. Loads are in experts a token: blocks over those of
an expert. Traces of several texts of one model are added up. What each rule does is said in
[contract.md](contract.md) (5, 14, 22, 23), where it comes from [below](#sources).
"""

CACHES = """\
## Caches

Widths full, unit `expert`, scope `layer`. *By event* is the execution contract: all experts that a
layer needs for a token are asked for together, count as equally recent, and none is evicted before
all have run; what finds no room is used and not kept. *By access* is what tools for caches replay:
each expert alone, in the order of the router's weights, always admitted; for the next expert of a
token one may be evicted that the same token has just used, or is about to. × is the first over the
second: what a device loads over what a study by access says. `belady` knows the future and may
decline to admit; `belady-forced` must admit whatever is asked for. By access that is the least that
a cache which always admits can load. By event it bounds nothing: it keeps the whole event before
all else, and where that fills a layer, foresight has no say.
"""

GLOBAL = """\
## One budget for all layers

Scope `global`, by event; in brackets, how much is loaded above `belady`. Here, and only here, does
`least-stale` differ from `lru`: within one layer, all that is not used in this pass is older than
what is.
"""

SUFFIXES = """\
## Suffixes before prefixes

Unit `block`, widths of the policy `crisp` (full, half or nothing, by tier), scope `layer`. A wide
task would find its leading blocks if the deepest went first, whosever they are; but an expert that
is used again soon lacks them then as well.
"""

PREFETCHERS = """\
## Prefetchers

Cache `lru`, full width, machine `rtx4090-pcie4`. Of the small models the routing alone is taken:
tiny-mixtral's for experts of Mixtral-8x7B's size, tiny-deepseek's for experts of
DeepSeek-MoE-16B's, in 4.25 bits. `perfect` is the control: it is told the tasks of the next layer,
and what it does not hide no prediction of the next layer can. Prefetched blocks are *useful* (there
when their event starts, and asked for), *late* (in flight, and asked for) or *wasted*. What the
previous token used is what `lru` holds anyway wherever a layer has room for an event: `previous`
then fetches nothing.
"""

ORDERS = """\
## Orders

Within one event, at equal residency and granularity `expert`, no order ends sooner than `johnson`
(Johnson, 1954; the tests try all permutations). Where each load takes at least as long as its
computation, Johnson's rule takes the longest computation first, which is the widest task's:
`widest` *is* `johnson` there. (What is wholly resident may stand anywhere: the link does not serve
it, and compute takes it when it would idle.) Where computing takes longer, it is not. By hand: a
block takes 1 ms to load and 2 ms to compute, nothing is resident, and an event asks for 8 blocks of
one expert and 2 of another.

| order | the wide one | the narrow one | the event |
|---|---|---|---:|
| `widest` | load 0 to 8, compute 8 to 24 | load 8 to 10, compute 24 to 28 | 28 ms |
| `johnson` | load 2 to 10, compute 10 to 26 | load 0 to 2, compute 2 to 6 | 26 ms |

Compute has 20 ms of work. Widest-first leaves it idle for 8 ms, the shortest load first for 2 + 4.

Whole runs: policy `crisp` (widths by tier, cache `lru`), budget 30 %. On `rtx4090-pcie4` loading is
nearly all there is; on `paper-table1` an expert, whatever its size, takes 5.6 ms to load and 1.3 ms
to compute; the third machine is the second with these two exchanged. The first line is ms a token,
the others the difference to it; `random` is the mean of three seeds.
"""

SOURCES = """\
## Sources

What was taken, in our words; where a paper's rule is larger than ours, what is left out.

- `lru`, `lfu`, `fifo`, `random`: textbook rules. `lfu-in-cache` forgets an expert's count when it
  leaves, as libCacheSim's LFU does.
- `slru`: Karedla, Love and Wherry, Caching strategies to improve disk system performance, IEEE
  Computer 27(3), 1994. A second use protects; the protected segment takes half of the room, which
  is our choice (theirs is a parameter).
- `lfru`: the expert cache of vLLM's pull request 37190, which evicts the lowest frequency over age.
  There, age counts single accesses and is never below 1; here it counts events.
- `least-stale`: after Hoang et al., SpecMD, arXiv 2602.03921, 2026. Taken are its two ideas: what
  this forward pass has not used goes before what it has, and the layer decides among the rest,
  lowest first. Ties by last use are ours.
- `tier-aware`: the paper's tiers, drawn between single experts. `suffix-lru`, `suffix-lfu`: ours.
- `belady`, `belady-forced`: Belady, A study of replacement algorithms for a virtual-storage
  computer, IBM Systems Journal 5(2), 1966; [contract.md](contract.md) (23) says how far they are
  bounds.
- `guess`: the speculative loading of Eliseev and Mazur, arXiv 2312.17238, 2023: the next layer's
  router on this layer's input. `previous`: a plain control. `frequent`: after EdgeMoE (Yi et al.,
  arXiv 2308.14352, 2023), which asks a table of what followed the experts of the two layers before;
  ours asks about the combination of one.
- `widest`: the paper's Algorithm 1. `narrowest`: the shortest processing time first (Smith, 1956).
  `resident-first`: cached experts first, as on the GPU of HybriMoE (Zhong et al., arXiv 2504.05897,
  2025), which also orders them by load.
"""
