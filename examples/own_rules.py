"""A width rule and an eviction rule: a plugin, which own_policy.py runs from Python.

Any command takes it too, such as (in this folder)
crisp simulate tiny-mixtral-docs --plugin own_rules.py --policy lru --cache largest --budget 30%
"""

from dataclasses import dataclass
from fractions import Fraction

from crisp.plugins import WidthPolicy, register_cache, register_width, table_of


@register_width("second")
@dataclass(frozen=True)
class Second(WidthPolicy):
    """The heaviest expert of a token in full, the others at a share of their neurons."""

    share: Fraction = Fraction(1, 2)

    def bind(self, spec, profile, ordered):
        return table_of(spec, profile, ordered, spec.n_blocks, spec.width(self.share))


@register_cache("largest")
def largest_victim(resident, protected, last, count, low, high):
    """Evict the expert with the most blocks; entries low to high - 1 are in question."""
    sizes = [0 if protected[e] else resident[e] for e in range(low, high)]
    return low + sizes.index(max(sizes))  # one that may be evicted is always among them
