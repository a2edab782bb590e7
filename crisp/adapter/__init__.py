"""Meeting a transformers model: what its routers decide, recorded; widths, executed.

One place serves every family. Transformers keeps the routed experts of a layer in one module whose
forward is ``(hidden [n, d], top_k_index [n, k], top_k_weights [n, k])`` and which looks its
implementation up in a common registry. Standing in front of that forward, we see exactly what the
router returned, and decide what is computed.
"""

from crisp.adapter.experts import Experts, execute
from crisp.adapter.layout import Handler, Layout, MoeLayer, handling, layout
from crisp.adapter.record import Recorder, Routing, looking_ahead, ranked, recording
from crisp.adapter.widths import Attached, Tally, attach

__all__ = [
    "Attached",
    "Experts",
    "Handler",
    "Layout",
    "MoeLayer",
    "Recorder",
    "Routing",
    "Tally",
    "attach",
    "execute",
    "handling",
    "layout",
    "looking_ahead",
    "ranked",
    "recording",
]
