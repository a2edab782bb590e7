"""The arithmetic of one layer's routed experts, for any number of their leading neurons.

Layouts differ (transformers says which by attributes of the module): gate and up matrices behind
one another or interleaved, matrices transposed, biases, no gate, activations of their own. At full
width every step is the one that transformers' own implementation takes, in its order, so that the
result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crisp.adapter.layout import MoeLayer
from crisp.errors import CrispError
from crisp.extras import need

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")


@dataclass(frozen=True, eq=False)
class Experts:
    """The routed experts of one layer; tensors stay in the model's module and are read there."""

    module: Any
    name: str
    n_experts: int
    d_model: int  # of the experts' input and output
    d_ff: int
    has_gate: bool
    has_bias: bool
    transposed: bool  # matrices are [in, out]
    concatenated: bool  # gate | up, not gate, up, gate, up, ...

    @classmethod
    def of(cls, layer: MoeLayer) -> Experts:
        """Raises CrispError, naming the module, where the layout is not understood."""
        module, name = layer.experts, layer.name
        who = f"{name} ({type(module).__name__})"
        lacks = [flag for flag in _FLAGS if not isinstance(getattr(module, flag, None), bool)]
        if lacks:
            raise CrispError(f"{who}: does not say its layout ({lacks[0]}); not understood")
        if module.has_post_expert_norm:
            raise CrispError(f"{who}: normalises each expert's output; widths are not understood")
        down = getattr(module, "down_proj", None)
        first = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
        if down is None or first is None or down.ndim != 3 or first.ndim != 3:
            raise CrispError(f"{who}: its matrices are not the three-dimensional ones expected")
        n_experts, d_ff, d_model = down.shape
        if not module.is_transposed:
            d_ff, d_model = d_model, d_ff
        wide = d_ff * (2 if module.has_gate else 1)
        shape = (d_model, wide) if module.is_transposed else (wide, d_model)
        if tuple(first.shape) != (n_experts, *shape):
            raise CrispError(
                f"{who}: gate and up are {tuple(first.shape)}, expected {(n_experts, *shape)}"
            )
        own = cls(
            module=module,
            name=name,
            n_experts=n_experts,
            d_model=d_model,
            d_ff=d_ff,
            has_gate=module.has_gate,
            has_bias=module.has_bias,
            transposed=module.is_transposed,
            concatenated=module.is_concatenated,
        )
        own._probe(who)
        return own

    def _probe(self, who: str) -> None:
        """A neuron's activation must depend on that neuron alone, or no prefix means anything."""
        torch = need("torch")
        wide = self.d_ff * (2 if self.has_gate else 1)
        rows = 4 * torch.sin(1.7 * torch.arange(wide, dtype=torch.float32))[None]
        with torch.no_grad():
            whole = self._activate(rows)
            for neurons in {1, self.d_ff // 2, self.d_ff} - {0}:
                try:
                    part = self._activate(rows[:, self._columns(neurons)])
                except RuntimeError as error:  # sizes that do not match: it has numbers a neuron
                    raise CrispError(
                        f"{who}: its activation does not take {neurons} neurons alone; "
                        "not understood"
                    ) from error
                # Vector and scalar code round the same function differently.
                if not torch.allclose(part, whole[:, :neurons], rtol=1e-4, atol=1e-5):
                    raise CrispError(f"{who}: its activation mixes neurons; not understood")

    def _columns(self, neurons: int) -> Any:
        """Where the leading neurons' gates and ups stand in the output of the first projection."""
        torch = need("torch")
        if not self.has_gate:
            return slice(neurons)
        if not self.concatenated:
            return slice(2 * neurons)
        own = torch.arange(neurons)
        return torch.cat([own, own + self.d_ff])

    def _activate(self, projected: Any) -> Any:
        act = self.module._apply_gate if self.has_gate else self.module.act_fn
        return act(projected)

    def activation(self, expert: int, x: Any, neurons: int) -> Any:
        """sigma(x W_gate) * (x W_up) (paper, Eq. 1) of the leading neurons: [rows, neurons].

        x [rows, d_model]. Without a gate it is sigma(x W_up).
        """
        first = self.module.gate_up_proj if self.has_gate else self.module.up_proj
        bias = None
        if self.has_bias:
            bias = self.module.gate_up_proj_bias if self.has_gate else self.module.up_proj_bias
            bias = bias[expert]
        weight = first[expert]
        if neurons == self.d_ff:
            parts = [slice(None)]
        elif self.has_gate and self.concatenated:
            parts = [slice(neurons), slice(self.d_ff, self.d_ff + neurons)]
        else:
            parts = [slice(2 * neurons if self.has_gate else neurons)]
        out = [self._linear(x, weight, bias, part) for part in parts]
        return self._activate(out[0] if len(out) == 1 else need("torch").cat(out, -1))

    def _linear(self, x: Any, weight: Any, bias: Any, part: slice) -> Any:
        if self.transposed:
            out = x @ weight[:, part]
        else:
            out = need("torch").nn.functional.linear(x, weight[part])
        return out if bias is None else out + bias[part]

    def output(self, expert: int, activation: Any) -> Any:
        """The expert's output [rows, d_model] from its leading neurons' activation.

        The bias of the down projection, where there is one, belongs to every width.
        """
        down, neurons = self.module.down_proj[expert], activation.shape[-1]
        if self.transposed:
            out = activation @ (down if neurons == self.d_ff else down[:neurons])
        else:
            own = down if neurons == self.d_ff else down[:, :neurons]
            out = need("torch").nn.functional.linear(activation, own)
        return out + self.module.down_proj_bias[expert] if self.has_bias else out

    def norms(self, expert: int) -> tuple[Any, Any]:
        """(gate and up weights of each neuron, its down row): L2 norms, float64 [d_ff] each."""
        torch = need("torch")
        first, down = self.neurons(expert)
        return (
            torch.linalg.vector_norm(first.double(), dim=(0, 2)),
            torch.linalg.vector_norm(down.double(), dim=1),
        )

    def matrices(self) -> list[tuple[str, Any]]:
        """(name, weight [experts, ...]) of the gate and up projection and of the down one."""
        first = "gate_up_proj" if self.has_gate else "up_proj"
        return [(f"{self.name}.{n}", getattr(self.module, n)) for n in (first, "down_proj")]

    def neurons(self, expert: int) -> tuple[Any, Any]:
        """Views by neuron: gate and up [2 (1 without a gate), d_ff, d_model], down [d_ff, d]."""
        first = self.module.gate_up_proj if self.has_gate else self.module.up_proj
        first, down = first[expert].detach(), self.module.down_proj[expert].detach()
        first = first.T if self.transposed else first  # [out, in]
        return self._by_neuron(first), down if self.transposed else down.T

    def biases(self) -> list[Any]:
        """Those of the neurons, [experts, ...]; none where the model has none."""
        name = "gate_up_proj_bias" if self.has_gate else "up_proj_bias"
        return [getattr(self.module, name).detach()] if self.has_bias else []

    def _by_neuron(self, first: Any) -> Any:
        """[gates and ups, ...] as [2 or 1, d_ff, ...]."""
        if not self.has_gate:
            return first[None]
        if self.concatenated:
            return first.unflatten(0, (2, self.d_ff))
        return first.unflatten(0, (self.d_ff, 2)).transpose(0, 1)

    def shuffle(self, expert: int, permutation: Any) -> None:
        """Put one expert's neurons into another order, in place: ``permutation`` int64 [d_ff]."""
        first, down = self.neurons(expert)
        first.copy_(first[:, permutation])
        down.copy_(down[permutation])
        if self.has_bias:
            bias = self.module.gate_up_proj_bias if self.has_gate else self.module.up_proj_bias
            own = self._by_neuron(bias[expert].detach())
            own.copy_(own[:, permutation])


def execute(
    experts: Experts,
    hidden: Any,
    index: Any,
    weights: Any,
    neurons: Any = None,
    *,
    watch: Callable[[int, Any], None] | None = None,
    watch_output: Callable[[int, Any, Any], None] | None = None,
) -> Any:
    """The routed experts' output [n, d_model], every (token, expert) at its own width.

    hidden [n, d_model]; index [n, k] (n_experts stands for no expert) and weights [n, k] as the
    router returned them; neurons int64 [n, k], leading ones to execute, 0 to skip; None: all.
    ``watch(expert, activation [rows, neurons])`` and ``watch_output(expert, tokens [rows],
    output [rows, d_model])``, before the router's weight, see each group of equal expert and width.
    """
    torch = need("torch")
    final = torch.zeros_like(hidden)
    n, stride = index.shape[0], experts.d_ff + 1
    key = index.long() * stride + (experts.d_ff if neurons is None else neurons)
    flat = key.T.reshape(-1)  # by rank, then token: the order in which transformers takes rows
    order = torch.argsort(flat, stable=True)
    groups, counts = torch.unique_consecutive(flat[order], return_counts=True)
    for group, rows in zip(groups.tolist(), order.split(counts.tolist()), strict=True):
        expert, width = divmod(group, stride)
        if expert == experts.n_experts or not width:
            continue
        rank, token = rows // n, rows % n
        activation = experts.activation(expert, hidden[token], width)
        if watch is not None:
            watch(expert, activation)
        output = experts.output(expert, activation)
        if watch_output is not None:
            watch_output(expert, token, output)
        output = output * weights[token, rank, None]
        final.index_add_(0, token, output.to(final.dtype))
    return final
