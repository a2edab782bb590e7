"""The arithmetic of one layer's routed experts, for any number of their leading neurons.

Layouts differ, and transformers says which by attributes of the module: gate and up matrices one
after the other or interleaved, matrices transposed, biases, no gate, activations of their own. At
full width every step is the one that transformers' own implementation takes, in its order, so that
the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crisp.adapter.alike import flags_of
from crisp.adapter.layout import MoeLayer
from crisp.errors import CrispError
from crisp.extras import import_extra

GATE, UP, DOWN = range(3)
"""The matrices of an expert."""


@dataclass(frozen=True, eq=False)
class Experts:
    """The routed experts of one layer; their tensors stay in the model's module."""

    module: Any
    name: str  # of the module
    n_experts: int
    d_model: int  # size of the experts' input and output
    d_ff: int  # neurons of an expert
    has_gate: bool
    has_bias: bool
    transposed: bool  # matrices are [in, out], not [out, in]
    concatenated: bool  # gate | up, not gate, up, gate, up, ...
    scales_inputs: bool = False  # the router's weight multiplies inputs, not outputs

    @classmethod
    def of(cls, layer: MoeLayer) -> Experts:
        """Return the experts of ``layer``; CrispError if their layout is not understood."""
        module, name = layer.experts, layer.name
        who = f"{name} ({type(module).__name__})"
        flags = flags_of(module)
        lacks = [flag for flag, value in flags.items() if not isinstance(value, bool)]
        if lacks:
            raise CrispError(f"{who}: does not say its layout ({lacks[0]}); not understood")
        if flags["has_post_expert_norm"]:
            raise CrispError(f"{who}: normalises each expert's output; widths are not understood")
        down = getattr(module, "down_proj", None)
        up = getattr(module, "gate_up_proj" if flags["has_gate"] else "up_proj", None)
        if down is None or up is None or down.ndim != 3 or up.ndim != 3:
            raise CrispError(f"{who}: its matrices are not the three-dimensional ones expected")
        n_experts, d_ff, d_model = down.shape
        if not flags["is_transposed"]:
            d_ff, d_model = d_model, d_ff
        rows = d_ff * (2 if flags["has_gate"] else 1)
        shape = (d_model, rows) if flags["is_transposed"] else (rows, d_model)
        if tuple(up.shape) != (n_experts, *shape):
            raise CrispError(
                f"{who}: gate and up are {tuple(up.shape)}, expected {(n_experts, *shape)}"
            )
        experts = cls(
            module=module,
            name=name,
            n_experts=n_experts,
            d_model=d_model,
            d_ff=d_ff,
            has_gate=flags["has_gate"],
            has_bias=flags["has_bias"],
            transposed=flags["is_transposed"],
            concatenated=flags["is_concatenated"],
            scales_inputs=layer.scales_inputs,
        )
        experts._check_activation(who)
        return experts

    def _check_activation(self, who: str) -> None:
        """Raise CrispError unless a neuron's activation depends on that neuron alone.

        Otherwise a prefix of the neurons would not compute a part of what all of them compute.
        """
        torch = import_extra("torch")
        columns = self.d_ff * (2 if self.has_gate else 1)
        projected = 4 * torch.sin(1.7 * torch.arange(columns, dtype=torch.float32))[None]
        with torch.no_grad():
            whole = self.activate(projected)  # [1, d_ff]
            for neurons in {1, self.d_ff // 2, self.d_ff} - {0}:
                try:
                    part = self.activate(projected[:, self._columns(neurons)])  # [1, neurons]
                except RuntimeError as error:  # sizes do not match: it has weights per neuron
                    raise CrispError(
                        f"{who}: its activation does not take {neurons} neurons alone; "
                        "not understood"
                    ) from error
                # Vector and scalar code round the same function differently.
                if not torch.allclose(part, whole[:, :neurons], rtol=1e-4, atol=1e-5):
                    raise CrispError(f"{who}: its activation mixes neurons; not understood")

    def _columns(self, neurons: int) -> Any:
        """Return the columns of the leading neurons in the output of the gate-up projection."""
        torch = import_extra("torch")
        if not self.has_gate:
            return slice(neurons)
        if not self.concatenated:
            return slice(2 * neurons)
        gates = torch.arange(neurons)
        return torch.cat([gates, gates + self.d_ff])

    def activate(self, projected: Any) -> Any:
        """Return the activation [rows, neurons] of projected [rows, 1 or 2 per neuron]."""
        if not self.has_gate:
            return self.module.act_fn(projected)
        if hasattr(self.module, "_apply_gate"):
            return self.module._apply_gate(projected)
        gate, up = projected.chunk(2, dim=-1)
        return self.module.act_fn(gate) * up

    def activation(self, expert: int, x: Any, neurons: int) -> Any:
        """Return sigma(x W_gate) * (x W_up) of the leading neurons: [rows, neurons].

        x [rows, d_model]. The formula is Eq. 1 of the paper; without a gate it is sigma(x W_up).
        """
        weight = self._up()[expert]  # [out, d_model], or transposed
        bias = self._up_bias()[expert] if self.has_bias else None  # [out]
        if neurons == self.d_ff:
            parts = [slice(None)]
        elif self.has_gate and self.concatenated:
            parts = [slice(neurons), slice(self.d_ff, self.d_ff + neurons)]
        else:
            parts = [slice(2 * neurons if self.has_gate else neurons)]
        out = [self._linear(x, weight, bias, part) for part in parts]
        return self.activate(out[0] if len(out) == 1 else import_extra("torch").cat(out, -1))

    def _up(self) -> Any:
        """Return the weight of the gate-up projection (without a gate: of the up projection)."""
        return self.module.gate_up_proj if self.has_gate else self.module.up_proj

    def _up_bias(self) -> Any:
        """Return the bias of the same projection, [experts, out]."""
        return self.module.gate_up_proj_bias if self.has_gate else self.module.up_proj_bias

    def _linear(self, x: Any, weight: Any, bias: Any, part: slice) -> Any:
        """Return x [rows, in] times the output columns ``part`` of a weight, plus their bias."""
        if self.transposed:
            out = x @ weight[:, part]
        else:
            out = import_extra("torch").nn.functional.linear(x, weight[part])
        return out if bias is None else out + bias[part]

    def output(self, expert: int, activation: Any) -> Any:
        """Return the expert's output [rows, d_model] from an activation [rows, neurons].

        The bias of the down projection, where there is one, belongs to every width.
        """
        down, neurons = self.module.down_proj[expert], activation.shape[-1]
        if self.transposed:
            out = activation @ (down if neurons == self.d_ff else down[:neurons])
        else:
            leading = down if neurons == self.d_ff else down[:, :neurons]
            out = import_extra("torch").nn.functional.linear(activation, leading)
        return out + self.module.down_proj_bias[expert] if self.has_bias else out

    def norms(self, expert: int) -> tuple[Any, Any]:
        """Return L2 norms [d_ff]: of each neuron's gate and up weights, and of its down row."""
        torch = import_extra("torch")
        up, down = self.neurons(expert)  # [2 or 1, d_ff, d_model], [d_ff, d_model]
        return (
            torch.linalg.vector_norm(up.double(), dim=(0, 2)),
            torch.linalg.vector_norm(down.double(), dim=1),
        )

    def matrices(self) -> list[tuple[str, Any]]:
        """Return (name, weight [experts, ...]) of the gate-up projection and of the down one."""
        up = "gate_up_proj" if self.has_gate else "up_proj"
        return [(f"{self.name}.{n}", getattr(self.module, n)) for n in (up, "down_proj")]

    def parameters(self) -> list[str]:
        """Return the names, in the model, of the parameters with weights or biases of neurons."""
        up = "gate_up_proj" if self.has_gate else "up_proj"
        leaves = [up, "down_proj"] + ([f"{up}_bias"] if self.has_bias else [])
        return [f"{self.name}.{leaf}" for leaf in leaves]

    def split(self, name: str, tensor: Any) -> list[tuple[int, Any]]:
        """Return one expert's matrices in its entry of a parameter: (which, [d_ff, columns]).

        name: one of `parameters`. Biases have one column.
        """
        if name.endswith("down_proj"):
            return [(DOWN, tensor if self.transposed else tensor.T)]
        is_bias = name.endswith("_bias")
        up = tensor[:, None] if is_bias else tensor.T if self.transposed else tensor
        return list(zip((GATE, UP) if self.has_gate else (UP,), self._by_neuron(up), strict=True))

    def neurons(self, expert: int) -> tuple[Any, Any]:
        """Return views by neuron of an expert's weights.

        Gate and up [2, d_ff, d_model] (without a gate [1, d_ff, d_model]) and down [d_ff, d_model].
        """
        up, down = self._up()[expert].detach(), self.module.down_proj[expert].detach()
        up = up.T if self.transposed else up  # [out, d_model]
        return self._by_neuron(up), down if self.transposed else down.T

    def biases(self) -> list[Any]:
        """Return the neurons' biases, [experts, ...] each; none where the model has none."""
        return [self._up_bias().detach()] if self.has_bias else []

    def _by_neuron(self, up: Any) -> Any:
        """Return [gates and ups, ...] as [2 or 1, d_ff, ...]."""
        if not self.has_gate:
            return up[None]
        if self.concatenated:
            return up.unflatten(0, (2, self.d_ff))
        return up.unflatten(0, (self.d_ff, 2)).transpose(0, 1)

    def shuffle(self, expert: int, permutation: Any) -> None:
        """Put one expert's neurons into another order, in place: ``permutation`` int64 [d_ff]."""
        up, down = self.neurons(expert)
        up.copy_(up[:, permutation])
        down.copy_(down[permutation])
        if self.has_bias:
            bias = self._by_neuron(self._up_bias()[expert].detach())  # [2 or 1, d_ff]
            bias.copy_(bias[:, permutation])


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
    """Return the routed experts' output [n, d_model], every (token, expert) at its own width.

    hidden [n, d_model]. index [n, k] (n_experts stands for no expert) and weights [n, k]: as the
    router returned them. neurons int64 [n, k]: how many leading neurons to execute, 0 to skip the
    expert; None: all of them.

    (token, expert)s of equal expert and width are computed together; each such group is shown to
    ``watch(expert, activation [rows, neurons])`` and ``watch_output(expert, tokens [rows],
    output [rows, d_model])``, the output before it is multiplied by the router's weight.
    """
    torch = import_extra("torch")
    final = torch.zeros_like(hidden)
    n, stride = index.shape[0], experts.d_ff + 1
    key = index.long() * stride + (experts.d_ff if neurons is None else neurons)  # [n, k]
    flat = key.T.reshape(-1)  # by rank, then token: the order in which transformers takes rows
    order = torch.argsort(flat, stable=True)
    groups, counts = torch.unique_consecutive(flat[order], return_counts=True)
    for group, rows in zip(groups.tolist(), order.split(counts.tolist()), strict=True):
        expert, width = divmod(group, stride)
        if expert == experts.n_experts or not width:
            continue
        rank, token = rows // n, rows % n
        inputs, weight = hidden[token], weights[token, rank, None]
        if experts.scales_inputs:
            inputs, weight = inputs * weight, 1
        activation = experts.activation(expert, inputs, width)  # [rows, width]
        if watch is not None:
            watch(expert, activation)
        output = experts.output(expert, activation)  # [rows, d_model]
        if watch_output is not None:
            watch_output(expert, token, output)
        output = output * weight
        final.index_add_(0, token, output.to(final.dtype))
    return final
