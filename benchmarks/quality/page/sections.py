"""The sections of the page: what each shows, and under which conditions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.quality.page import section_tables
from benchmarks.quality.page.tables import Figure


@dataclass(frozen=True)
class Section:
    """A section of the page; ``body`` makes a model's tables from the figures of ``name``."""

    name: str
    title: str
    text: str
    body: Callable[[Figure], str]
    picture: str | None = None


SECTIONS = (
    Section("policies", "The policies (Figure 7)", """\
The headline, with a sliding window: windows of 256 tokens start at every 128, and each scores
its last 128, so that a scored token has 128 or more before it. EdgeMoE gives the best quarter
of a layer's experts 8 bits, the worst quarter 2 and the others 4 (fake quantisation: rounded
weights, full-precision arithmetic, a 16-bit scale for 64 weights); best by how often an expert
is used, or by the mean size of what it adds. Its bytes count these bits and are those of
16-bit weights otherwise. Bits and widths could be combined; nothing here does. The paper's
figures are of Mixtral-8x7B on WikiText-103; of DeepSeek-MoE it has 6.89 tiered and 8.21
uniform.""", section_tables.policies, "policies"),
    Section("orders", "Orders of neurons (Figure 12)", """\
Every expert at the same share of its neurons, the leading ones in each order. `random` is the
mean of three draws, with their range in place of an interval. Which order the paper's 4.89
belongs to is read off its figure; on DeepSeek-MoE it has 10.47, 9.18, 7.94 and 7.15 in the
same order.""", section_tables.orders, "orders"),
    Section("strategies", "Strategies and plain rules (Figure 13, Table 4)", """\
Under the paper's own Eq. 4 its tiers touch 87.5 % of the bytes; the 42 % it prints follow only
with a cache. The second part holds controls. *Renormalised*: the weight of skipped experts
goes to the token's others; elsewhere it is dropped. *Tiers at random*: a layer's combinations
in random order, cut at the same shares of events, drawn until as many bytes are touched:
frequency decides nothing (three draws, their range as interval). *Roles*: how the dominant
expert of a pair is told (elsewhere: grouped); `by router weight` takes each token's heavier
one (models with more than two experts a token always do). *Skip by router weight* (width
`skip`): an expert is skipped where its weight is below a share of the token's first one's, one
share for all layers. *Block by contribution* (width `contribution`): a block runs where router
weight times the block's mean contribution (mean |activation| times the norm of the down rows,
summed) reaches a threshold of its layer; the width is the leading blocks before the first that
does not. Thresholds are set on calibration text to meet the bytes named; what was met on
held-out text is printed.
""", section_tables.strategies),
    Section("masking", "Dominant and auxiliary experts (Figure 4)", """\
The 20 most frequent combinations of the whole model. One expert is masked in one layer for the
tokens of one combination; the figure is by how much the perplexity of the whole text grows, so
it also says how frequent the combination is. Which expert is the dominant one was decided on
calibration text (grouped form).""", section_tables.masking, "roles"),
    Section("classes", "Whom uniform widths hurt (Figure 1)", """\
All experts at 50 %. Events (one combination of one token in one layer) are sorted by how
frequent their combination is in calibration text; each counts the token it belongs to, so that
tokens, with an event in every layer, count in several rows. The last column of ours narrows
the experts of one class only.""", section_tables.classes),
    Section("expert", "One expert, pair by pair (Figure 2)", """\
The expert with the most tokens in the rarer of its two roles (roles from calibration text).
Combinations of fewer than 32 tokens are left out.""", section_tables.expert),
    Section("tiers", "Tier by tier (Figure 15)", """\
Share of events whose token keeps its top prediction. A token has an event in every layer, so
the tiers of its other layers act on it as well; the column *only this tier's rule* has the
others at full width.""", section_tables.tiers),
    Section("memory", "The same bytes (Figure 9)", """\
Each tiered setting, in bold, with the uniform width and the numbers of experts that come
nearest to its bytes. Widths are matched by the bytes a token touches. Dropping experts (the
router chooses among the rest) leaves the bytes a token touches as they are; it is matched by
what is left to store, while tiered widths still store everything. The paper has 73.4, 70.5 and
69.6 % accuracy for tiered, uniform and dropping where 40 % of the experts fit (full: 74.6 %).
""", section_tables.memory),
    Section("shift", "Other text (Figure 16)", """\
Order, tiers and roles (local form) from calibration text of one kind, used on held-out text of
another. Bytes differ, as another text's tiers cover other shares of the events. Refreshed:
tiers and roles from the text's own kind, the neurons still in the other's order. Tiers at
random: the text's own order of neurons and roles, but its combinations in random order cut at
the same shares of events (three draws, their range as interval). The paper loses 2.7 points of
accuracy at worst, and 0.5 after a refresh.""", section_tables.shift, "shift"),
    Section("settling", "How much calibration text", """\
Tiers and roles (local form) from a growing share of the calibration text, all kinds alike,
against those of the last row; combinations weighted by their frequency there. For the last
column, order, tiers and roles are all from these tokens.""", section_tables.settling),
    Section("roles", "Ways of telling roles", """\
*Exact* masks one expert of one pair in one pass, as the paper does; *grouped* masks an expert
of a random share of the tokens and charges each token's loss to its own pair; *local* takes
the mean size of what the expert adds, which calibration measures on the way; *by router
weight* calls dominant the expert that is the heavier one more often. Passes run from the
masked layer up. Seconds are of the machine this was run on, which had other work. The last
column: events in which the dominant expert is also the one with the larger router weight. The
perplexity of widths with each way's roles is in the table of strategies.""", section_tables.roles),
)  # fmt: skip
