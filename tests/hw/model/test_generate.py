"""A model that writes with its experts in a store, against the model with all of them in memory."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import attach, record_routing  # noqa: E402
from crisp.checkpoint.loading import load_model, load_tokenizer  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.hw.decisions import DecisionLog, replay_decisions, same_decisions  # noqa: E402
from crisp.hw.devices.cpu.device import CpuDevice  # noqa: E402
from crisp.hw.devices.options import DeviceOptions  # noqa: E402
from crisp.hw.devices.protocol import Copy, Done  # noqa: E402
from crisp.hw.errors import DeviceError  # noqa: E402
from crisp.hw.model.generate import GeneratedText, TextWriter, generate  # noqa: E402
from crisp.hw.model.resident import ResidentModel, open_resident  # noqa: E402
from crisp.hw.replay import replay  # noqa: E402
from crisp.hw.store.packing import pack, pack_synthetic  # noqa: E402
from crisp.hw.store.reader import Store  # noqa: E402
from crisp.model.spec import ModelSpec  # noqa: E402
from crisp.policy import Budget, named  # noqa: E402
from crisp.policy.routing.rules import Routing  # noqa: E402
from crisp.profile import Profile  # noqa: E402
from crisp.profile.metadata import FILE, Metadata  # noqa: E402
from crisp.run.case import Case, Conditions  # noqa: E402
from crisp.run.compare import check_same_case  # noqa: E402
from crisp.run.sinks import FullTimeline  # noqa: E402
from crisp.run.timeline import BLOCKS, EVENT, EXPERT, FIRST, KIND, LAYER_ID, LOAD  # noqa: E402
from crisp.sim.hardware import hardware_profile  # noqa: E402
from crisp.sim.simulate import simulate  # noqa: E402
from crisp.trace import DECODE, PREFILL, Header, RoutingTrace  # noqa: E402
from crisp.trace.fitting import fit_to_trace  # noqa: E402
from tests.hw.exact import Exact, planted, watching  # noqa: E402

TRAINED = ("tiny-mixtral", "tiny-deepseek")
TRACES = Path(__file__).parents[3] / "traces"
PROMPT, NEW = "In the beginning of the journey, there was", 20

# Float32 rounds to 6e-8 of a number; sums of at most 320 products, in another order, through 6
# layers. Differences are given as shares of the largest logit.
ROUNDING = 1e-5


@dataclass(frozen=True, eq=False)
class Pair:
    """A folder's model, whole and with its experts in a store, and a prompt for it."""

    folder: Path
    whole: Any
    model: ResidentModel
    prompt: str

    @property
    def ids(self) -> list[int]:
        found: list[int] = self.model.loaded.tokenizer(self.prompt)["input_ids"]
        return found

    @functools.cached_property
    def reference(self) -> tuple[list[int], Any]:
        return self.written()

    def written(self) -> tuple[list[int], Any]:
        """(new tokens, their logits [new, vocabulary]) of the whole model."""
        own = self.whole
        own.generation_config = transformers.GenerationConfig(pad_token_id=0)
        ids = torch.tensor([self.ids])
        made = own.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return made.sequences[0, ids.shape[1] :].tolist(), torch.cat(made.logits).float()

    def generate(
        self, policy: Any, budget: str, granularity: str = "expert", **more: Any
    ) -> tuple[GeneratedText, Any]:
        """(what was written, its logits [new, vocabulary]) with experts in the store."""
        logits: list[Any] = []
        hook = self.model.loaded.model.register_forward_hook(
            lambda _, __, output: logits.append(output.logits[0, -1].float())
        )
        try:
            made = generate(
                self.model, policy, Budget.parse(budget), DeviceOptions(), self.prompt, NEW,
                **{"conditions": Conditions(granularity), **more},
            )  # fmt: skip
        finally:
            hook.remove()
        return made, torch.stack(logits)


def differ(a: Any, b: Any) -> float:
    """The largest difference, as a share of the largest number."""
    return float((a - b).abs().max() / b.abs().max())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


_PAIRS: dict[str, Pair] = {}


def trained(folder: Path, name: str, kind: str) -> Pair:
    """A trained model in fp32 or, as it is, in bf16; its store is of the same type."""
    key = f"{name}-{kind}"
    if key not in _PAIRS:
        source, whole = TRACES / name, load_model(str(TRACES / name)).model
        if kind == "fp32":
            whole, source = whole.float(), folder / key
            whole.save_pretrained(source)
            load_tokenizer(TRACES / name).save_pretrained(source)
        store = pack(source, folder / f"{key}.store")
        assert store.dtype == kind
        _PAIRS[key] = Pair(source, whole, open_resident(source, store), PROMPT)
    return _PAIRS[key]


# -- full width changes nothing --------------------------------------------------------------------

CELLS: list[tuple[str, dict[str, str], str, str]] = [
    ("fo", {}, "100%", "expert"),
    ("fo", {}, "5%", "block"),
    ("lru", {}, "5%", "expert"),
    ("lru", {}, "100%", "block"),
    ("lru", {"unit": "block", "scope": "global"}, "35%", "block"),
    ("lru", {"order": "widest", "cache": "lfu"}, "20%", "expert"),
    ("lru", {"prefetch": "previous"}, "20%", "expert"),
    ("mo", {}, "20%", "expert"),
    ("mo", {"unit": "block", "order": "random"}, "50%", "block"),
]


@pytest.mark.parametrize("name", TRAINED)
def test_greedy_tokens_are_the_whole_models_for_every_policy_and_budget(
    folder: Path, name: str
) -> None:
    pair = trained(folder, name, "fp32")
    tokens, reference = pair.reference
    first = None
    for policy, parts, budget, granularity in CELLS:
        made, logits = pair.generate(named(policy, **parts), budget, granularity)
        first = logits if first is None else first
        assert torch.equal(logits, first), (policy, parts, budget)  # to the bit
        assert list(made.tokens) == tokens
        assert made.text == pair.model.loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    assert differ(first, reference) < ROUNDING


@pytest.mark.parametrize("name", TRAINED)
def test_in_bfloat16_experts_and_tokens_are_those_of_float64_within_rounding(
    folder: Path, tmp_path: Path, name: str
) -> None:
    pair = trained(folder, name, "bf16")
    check_in_bfloat16(pair, Exact(load_model(str(pair.folder)).model), tmp_path)


def check_in_bfloat16(pair: Pair, exact: Exact, folder: Path) -> None:
    """What is computed and written is right; with one block or one expert of the store another's,
    it is not."""
    with watching(pair.model) as events:
        made, logits = pair.generate(named("lru"), "20%")
    exact.check_experts(events)
    assert exact.check_tokens(pair.ids, list(made.tokens), logits, events) > 2
    store = pair.model.store
    last = len(store.spec.moe_layers) - 1
    for row, blocks in ((1, range(2, 3)), (last, range(store.spec.n_blocks))):
        routed = made.trace.experts[: len(pair.ids), store.spec.moe_layers[row]]
        busiest = np.bincount(routed.ravel()).argmax()  # of the prompt: there it is used again
        other = planted(store, folder / str(row), row, int(busiest), blocks)
        wrong = dataclasses.replace(pair, model=dataclasses.replace(pair.model, store=other))
        with watching(wrong.model) as events:
            wrong.generate(named("lru"), "20%")
        exact.check_experts([own if i != row else [] for i, own in enumerate(events)])
        with pytest.raises(AssertionError):
            exact.check_experts(events)


def test_experts_are_nowhere_in_memory(folder: Path) -> None:
    pair = trained(folder, "tiny-mixtral", "fp32")
    pair.generate(named("lru"), "100%")
    model = pair.model.loaded.model
    for name, parameter in model.named_parameters():
        routed = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        assert parameter.is_meta == routed, name
    own = dict(pair.whole.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            assert torch.equal(parameter, own[name]), name
            assert parameter.dtype == own[name].dtype
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied, as the config says


def test_a_long_prompt_runs_in_chunks(folder: Path) -> None:
    pair = trained(folder, "tiny-mixtral", "fp32")
    rows = len(pair.ids)
    everything = FullTimeline()
    made, logits = pair.generate(
        named("lru"), "30%", conditions=Conditions(chunk=3), sinks=[everything]
    )
    assert list(made.tokens) == pair.reference[0]
    assert differ(logits[-(NEW - 1) :], pair.reference[1][1:]) < ROUNDING
    steps = -(-rows // 3) + NEW - 1
    assert everything.rows[:, 0].max() + 1 == steps
    assert made.run.metrics["tokens"] == made.trace.rows == rows + NEW - 1
    assert made.trace.phase.tolist() == [PREFILL] * rows + [DECODE] * (NEW - 1)
    # the time to the first token is that of all chunks: rows over rows a second
    rate = made.run.metrics["prefill_tokens_per_second"]
    assert made.run.metrics["ttft_ms"] == pytest.approx(1e3 * rows / rate)


def test_a_whole_prompt_reads_each_expert_once(folder: Path) -> None:
    """No cache holds anything, so what is read is the union of experts of each layer of a step."""
    pair = trained(folder, "tiny-mixtral", "fp32")
    rows, spec = len(pair.ids), pair.model.store.spec
    runs = {}
    for chunk in (3, "whole"):
        made, logits = pair.generate(named("fo"), "5%", conditions=Conditions(chunk=chunk))
        size = rows if chunk == "whole" else 3
        steps = [slice(at, min(at + size, rows)) for at in range(0, rows, size)]
        steps += [slice(at, at + 1) for at in range(rows, made.trace.rows)]
        loads = sum(
            len(np.unique(made.trace.experts[step, layer]))
            for step in steps
            for layer in spec.moe_layers
        )
        assert made.run.metrics["bytes_loaded"] == loads * spec.expert_bytes
        assert list(made.tokens) == pair.reference[0]
        assert differ(logits[-NEW:], pair.reference[1]) < ROUNDING
        runs[chunk] = made.run
    case = Case(
        made.trace, spec, named("fo"), Budget.parse("5%"), Profile.empty(spec),
        Conditions(phase="all", chunk="whole"),
    )  # fmt: skip
    again = simulate(case, hardware_profile("rtx4090-pcie4"))
    check_same_case(again, runs["whole"])
    assert again.metrics["bytes_loaded"] == runs["whole"].metrics["bytes_loaded"]
    assert runs["whole"].metrics["bytes_loaded"] < runs[3].metrics["bytes_loaded"]


# -- widths, and the routing that was run ----------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_widths_are_those_of_the_attached_model(folder: Path, name: str) -> None:
    pair = trained(folder, name, "fp32")
    made, _ = pair.generate(named("fo"), "5%")
    spec, draw = pair.model.store.spec, np.random.default_rng(0)
    factors = draw.uniform(0.5, 1.5, (spec.n_layers, spec.n_experts, spec.n_blocks + 1))
    counts = dataclasses.replace(
        Profile.from_trace(made.trace), rescaling=factors.astype(np.float32)
    )
    rescaled = named("crisp", rescale="measured")
    for policy in (named("up"), named("crisp"), rescaled, named("lru", width="single")):
        with attach(pair.whole, policy, counts, spec=pair.model.store.spec) as attached:
            tokens, expected = pair.written()
        written, logits = pair.generate(policy, "20%", profile=counts)
        assert list(written.tokens) == tokens
        assert differ(logits, expected) < ROUNDING
        assert written.run.metrics["skipped"] == attached.tally.skipped
        again = pair.generate(policy, "60%", "block", profile=counts)[1]
        assert torch.equal(logits, again)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("rule", ["cache-prior(.5)", "substitute(.3)", "skip-missing"])
def test_routing_rules_decide_as_in_the_attached_model(folder: Path, name: str, rule: str) -> None:
    """Both feed the prompt row by row, so that all is decided in the same state of the cache."""
    pair, seen = trained(folder, name, "fp32"), list[Any]()
    policy, budget = named("lru", unit="block", routing=rule), "20%"
    with attach(
        pair.whole, policy, spec=pair.model.store.spec, budget=Budget.parse(budget),
        watch=lambda which, ids, weights, _: seen.append((which, ids, weights)),
    ) as attached:  # fmt: skip
        tokens, expected = pair.written()
    written, logits = pair.generate(policy, budget, conditions=Conditions(chunk=1))
    assert list(written.tokens) == tokens
    assert differ(logits[-len(tokens) :], expected) < ROUNDING
    for which, layer in enumerate(pair.model.store.spec.moe_layers):
        ids, weights = (
            np.concatenate([one[part] for one in seen if one[0] == which]) for part in (1, 2)
        )
        assert np.array_equal(written.trace.experts[:, layer], ids)
        assert written.trace.weights is not None
        # the last bit of a float16 weight may go with the last bits of float32 arithmetic
        assert np.allclose(written.trace.weights[:, layer], weights, rtol=2**-9, atol=2**-23)
    tally, metrics = attached.tally, written.run.metrics
    for key in ("tasks", "hits", "partial_hits", "blocks_loaded", "skipped"):
        assert metrics[key] == getattr(tally, key)
    # the trace records what was executed, so the router's own choice replays it
    case = Case(
        written.trace, pair.model.store.spec, dataclasses.replace(policy, routing=Routing()),
        Budget.parse(budget), Profile.empty(pair.model.store.spec),
        Conditions(phase="all", chunk=1),
    )  # fmt: skip
    again = simulate(case, hardware_profile("rtx4090-pcie4")).metrics
    assert [again[k] for k in ("tasks", "hits", "blocks_loaded")] == [
        metrics[k] for k in ("tasks", "hits", "blocks_loaded")
    ]


def test_a_trace_with_scores_is_routed_anew_alike_in_simulation_and_replay(folder: Path) -> None:
    pair = trained(folder, "tiny-mixtral", "fp32")
    with record_routing(pair.whole, scores=True) as recorder, torch.inference_mode():
        pair.whole(input_ids=torch.tensor([pair.ids * 3]), use_cache=False)
        routing = recorder.take()
    n, spec = len(routing.experts), pair.model.store.spec
    trace = RoutingTrace(
        experts=routing.experts, weights=routing.weights.astype(np.float16), scores=routing.scores,
        sequence=np.zeros(n, np.int32), position=np.arange(n, dtype=np.int32),
        phase=np.full(n, DECODE, np.uint8),
        header=Header(n_experts=8, top_k=2, ordered=True, origin="captured"),
    )  # fmt: skip
    policy = named("lru", unit="block", routing="substitute(.1)")
    case = Case(trace, spec, policy, Budget.parse("30%"), Profile.empty(spec), Conditions("block"))
    simulated, replayed = DecisionLog(), DecisionLog()
    machine = hardware_profile("rtx4090-pcie4")
    simulate(case, machine, sinks=[simulated.sink], watch=simulated.watch)
    replay(
        case, pair.model.store, DeviceOptions(), sinks=[replayed.sink], watch=replayed.watch
    )  # fmt: skip
    plain = DecisionLog()
    as_routed = dataclasses.replace(case, policy=named("lru", unit="block"))
    simulate(as_routed, machine, sinks=[plain.sink], watch=plain.watch)
    assert same_decisions(replayed, simulated)
    assert replay_decisions(case, replayed)
    assert not same_decisions(plain, simulated)


@pytest.mark.parametrize("name", TRAINED)
def test_magnitudes_decide_as_in_the_attached_model(folder: Path, name: str) -> None:
    """And the trace that is recorded gives the same loads in simulation and replay."""
    pair, seen = trained(folder, name, "fp32"), list[Any]()
    spec, rng = pair.model.store.spec, np.random.default_rng(4)
    layers, n = spec.n_layers, spec.n_experts
    sizes = -np.sort(-rng.random((layers, n, spec.n_blocks)), axis=2)
    profile = dataclasses.replace(
        Profile.empty(spec), expert_counts=np.ones((layers, n), np.int64),
        router_weights=np.full((layers, n, 32), 1 / spec.top_k, np.float16),
        contributions=sizes.astype(np.float32), sensitivities=np.ones(layers, np.float32),
        magnitudes=rng.normal(0, 0.05, (layers, n, spec.d_model + 1)).astype(np.float16),
    )  # fmt: skip
    policy = named("saliency", rescale="none", magnitude="predicted")
    with attach(
        pair.whole, policy, profile, spec=spec, budget=Budget.parse("20%"),
        watch=lambda which, ids, _, widths: seen.append((which, ids, widths)),
    ) as attached:  # fmt: skip
        tokens, expected = pair.written()
    made, logits = pair.generate(policy, "20%", profile=profile, conditions=Conditions(chunk=1))
    assert list(made.tokens) == tokens
    assert differ(logits[-len(tokens) :], expected) < ROUNDING
    for key in ("tasks", "hits", "partial_hits", "blocks_loaded", "skipped"):
        assert made.run.metrics[key] == getattr(attached.tally, key)
    assert made.trace.magnitudes is not None
    assert np.ptp(made.trace.magnitudes.astype(float)) > 0.5
    conditions = Conditions(phase="all", chunk=1)
    case = Case(made.trace, spec, policy, Budget.parse("20%"), profile, conditions)
    simulated, replayed = DecisionLog(), DecisionLog()
    simulate(case, "rtx4090-pcie4", sinks=[simulated.sink], watch=simulated.watch)
    run = replay(
        case, pair.model.store, DeviceOptions(), sinks=[replayed.sink], watch=replayed.watch
    )  # fmt: skip
    assert run.metrics["blocks_loaded"] == made.run.metrics["blocks_loaded"]
    assert same_decisions(replayed, simulated)
    assert replay_decisions(case, replayed)
    plain = dataclasses.replace(case, policy=dataclasses.replace(policy, magnitude="none"))
    assert simulate(plain, "rtx4090-pcie4").metrics["blocks_loaded"] != run.metrics["blocks_loaded"]


@pytest.mark.parametrize("name", TRAINED)
def test_the_recorded_trace_gives_the_same_loads_in_simulation_and_replay(
    folder: Path, name: str, tmp_path: Path
) -> None:
    pair, everything = trained(folder, name, "fp32"), FullTimeline()
    policy, conditions = named("lru", unit="block"), Conditions("block", "all", chunk=4)
    made, _ = pair.generate(policy, "30%", conditions=conditions, sinks=[everything])
    made.trace.save(tmp_path / "own.trace.safetensors")
    trace = RoutingTrace.load(tmp_path / "own.trace.safetensors")
    spec = ModelSpec.from_dict(trace.header.spec or {})
    assert fit_to_trace(spec, trace) == pair.model.store.spec
    case = Case(trace, spec, policy, Budget.parse("30%"), Profile.empty(spec), conditions)
    simulated, replayed = FullTimeline(), FullTimeline()
    runs = [
        simulate(case, hardware_profile("rtx4090-pcie4"), sinks=[simulated]),
        replay(case, pair.model.store, DeviceOptions(), sinks=[replayed]),
    ]
    loads = [of_loads(one.rows) for one in (everything, simulated, replayed)]
    assert loads[0] == loads[1] == loads[2]
    for run in runs:
        for metric in ("tokens", "tasks", "hits", "partial_hits", "blocks_loaded", "skipped"):
            assert run.metrics[metric] == made.run.metrics[metric]
        check_same_case(run, made.run)


def of_loads(rows: Any) -> list[list[int]]:
    return rows[rows[:, KIND] == LOAD][:, [EVENT, LAYER_ID, EXPERT, FIRST, BLOCKS]].tolist()


@pytest.mark.parametrize("name", TRAINED)
def test_routing_and_guesses_are_what_a_recorder_sees(folder: Path, name: str) -> None:
    pair = trained(folder, name, "fp32")
    made, _ = pair.generate(named("mo"), "20%")
    fed = torch.tensor([pair.ids + list(made.tokens[:-1])])
    with torch.no_grad(), record_routing(pair.whole) as recorder:
        pair.whole(fed, use_cache=False)
        routing = recorder.take()
    assert np.array_equal(made.trace.experts, routing.experts)
    assert made.trace.guess is not None
    assert np.array_equal(made.trace.guess, routing.guess)
    assert np.allclose(made.trace.weights, routing.weights, atol=1e-3)
    without, _ = pair.generate(named("mo", prefetch="previous"), "20%")
    assert without.trace.guess is None


# -- other families --------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FINE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENT = {
    "intermediate_size": 40, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "tie_word_embeddings": False},
    "phimoe": {"num_local_experts": 6},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "qwen2_moe": {**FINE, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]},
    "qwen3_moe": {**FINE, "head_dim": 8, "norm_topk_prob": True},
    "deepseek_v2": LATENT,
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 8},
}


def random_pair(folder: Path, family: str, kind: Any) -> Pair:
    """A random model of a family, all biases and routers drawn, and words t0 to t95 for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    auto = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32)
    for name, value in model.named_parameters():
        if value.dim() > 1 or name.endswith("bias"):
            torch.nn.init.normal_(value, std=0.25)
    source = folder / f"{family}-{str(kind).removeprefix('torch.')}"
    model.to(kind).save_pretrained(source)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)
    whole = auto.from_pretrained(source, dtype="auto", experts_implementation="eager").eval()
    store = pack(source, folder / f"{source.name}.store", block=8)
    prompt = " ".join(f"t{i}" for i in (5, 17, 90, 33, 6, 71, 12))
    return Pair(source, whole, open_resident(source, store), prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_what_it_writes_whole(folder: Path, family: str) -> None:
    pair = random_pair(folder, family, torch.float32)
    tokens, reference = pair.reference
    made, logits = pair.generate(named("mo"), "30%", "block")
    assert list(made.tokens) == tokens
    assert differ(logits, reference) < ROUNDING
    for policy in (named("up"), named("lru", width="single")):  # the second skips experts
        with attach(pair.whole, policy, spec=pair.model.store.spec):
            tokens, expected = pair.written()
        made, logits = pair.generate(policy, "30%")
        assert list(made.tokens) == tokens
        assert differ(logits, expected) < ROUNDING


@pytest.mark.parametrize(
    ("family", "kind"), [("deepseek_v2", torch.bfloat16), ("gpt_oss", torch.float16)]
)
def test_every_parameter_has_the_type_that_transformers_gives_it(
    folder: Path, family: str, kind: Any
) -> None:
    """Routers of the one, and norms of the other, are float32."""
    pair = random_pair(folder, family, kind)
    own = dict(pair.whole.state_dict())
    for name, tensor in pair.model.loaded.model.state_dict().items():
        if not tensor.is_meta:
            assert tensor.dtype == own[name].dtype, name
            assert torch.equal(tensor, own[name]), name
    assert pair.generate(named("lru"), "30%")[0].tokens


# -- text ------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer of bytes that, as some do, drops the space that a text begins with."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", "replace").removeprefix(" ")


def test_text_is_told_in_whole_characters_with_its_spaces() -> None:
    told: list[str] = []
    writer = TextWriter(Bytes(), list(b"once"), told.append)
    for token in (list(b"once"), *([byte] for byte in " é b".encode()), [0xC3]):
        writer.put(torch.tensor(token))
    assert told == [" ", "é", " ", "b"]
    writer.end()
    assert told[4:] == ["\ufffd"]  # it was cut off
    assert writer.text == " é b\ufffd"


# -- what is refused -------------------------------------------------------------------------------


def refused(folder: Path, store: Store, **more: Any) -> str:
    with pytest.raises(CrispError) as error:
        open_resident(folder, store, **more)
    return str(error.value)


def test_a_store_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    one, other = (trained(folder, name, "fp32") for name in TRAINED)
    told = refused(one.folder, other.model.store)
    assert told == (
        f"{other.model.store.path}: is a store of {other.model.store.spec.name}, not of the model "
        f"{one.folder}"
    )
    made = pack_synthetic(one.model.store.spec, tmp_path / "random", dtype="fp32")
    assert "holds random weights" in refused(one.folder, made)


@pytest.mark.parametrize("changed", ["experts", "attention"])
def test_a_store_of_other_weights_is_refused(folder: Path, tmp_path: Path, changed: str) -> None:
    """At once where experts differ; where others do, when all are asked for."""
    pair = trained(folder, "tiny-mixtral", "fp32")
    store = pair.model.store
    model = load_model(str(pair.folder)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if changed in name or (changed == "attention" and "self_attn" in name):
                parameter.mul_(1.01)
    model.save_pretrained(tmp_path)
    load_tokenizer(pair.folder).save_pretrained(tmp_path)
    expected = f"{store.path}: was packed from other weights than those in {tmp_path}"
    if changed == "experts":
        assert refused(tmp_path, store) == expected
    else:
        open_resident(tmp_path, store)
    assert refused(tmp_path, store, verify=True) == expected
    open_resident(pair.folder, store, verify=True)


def test_a_prepared_models_metadata_must_be_of_the_store(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = trained(folder, "tiny-mixtral", "fp32")
    shutil.copytree(pair.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / FILE).touch()
    monkeypatch.setattr(Metadata, "load", lambda path: SimpleNamespace(weights="0" * 64))
    assert "was packed from other weights" in refused(tmp_path, pair.model.store)


@pytest.mark.parametrize(
    ("parts", "prompt", "new", "told"),
    [
        ({"width": "tiered"}, PROMPT, 1, "policy lru: width tiered needs counts"),
        ({"cache": "static"}, PROMPT, 1, "policy lru: cache static needs counts"),
        ({"order": "johnson"}, PROMPT, 1, "order johnson: asks for times"),
        ({}, "", 1, "--prompt: has no tokens"),
        ({}, PROMPT, 0, "--max-new-tokens 0: expected 1 or more"),
        ({}, PROMPT, 600, "--max-new-tokens 600: the model's context is 512"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    folder: Path, parts: dict[str, str], prompt: str, new: int, told: str
) -> None:
    model = trained(folder, "tiny-mixtral", "fp32").model
    with pytest.raises(CrispError, match=told):
        generate(model, named("lru", **parts), Budget.parse("5%"), DeviceOptions(), prompt, new)


# -- what goes wrong on the way --------------------------------------------------------------------


@dataclass(frozen=True)
class Breaking(DeviceOptions):
    """Opens a device whose copy number ``at`` fails with what ``instead`` returns, if it does."""

    at: int = 0
    instead: Callable[[], BaseException | None] = lambda: None

    def open(self, store: Store, slots: int) -> Any:
        options = self

        class Device(CpuDevice):
            copies = 0

            def copy(self, request: Copy, done: Done) -> None:
                self.copies += 1
                failure = options.instead() if self.copies == options.at else None
                if failure is None:
                    super().copy(request, done)
                else:
                    threading.Thread(target=done, args=(self.clock(), failure)).start()

        return Device(store, slots)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Ends the process with everybody's tracebacks if something hangs."""
    import faulthandler

    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def fails() -> BaseException:
    return DeviceError("the disk is gone")


def interrupts() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("instead", "error"),
    [
        (fails, DeviceError),
        (interrupts, KeyboardInterrupt),
    ],
    ids=["failure", "Ctrl-C"],
)
def test_nothing_wrong_is_told_and_nothing_is_left(
    folder: Path, instead: Callable[[], Any], error: type[BaseException]
) -> None:
    pair = trained(folder, "tiny-mixtral", "fp32")
    whole = pair.generate(named("fo"), "5%")[0]
    reads = whole.run.metrics["tasks"]
    assert isinstance(reads, int)
    told: list[str] = []
    # without a cache every task is a read: this one is of the middle of a token's layers
    options = Breaking(at=reads - 5 * 12 + 6, instead=instead)
    with within(60), pytest.raises(error):
        generate(
            pair.model, named("fo"), Budget.parse("5%"), options, PROMPT, NEW, on_text=told.append
        )
    expected = pair.model.loaded.tokenizer.decode(whole.tokens[: NEW - 5])
    assert "".join(told) == expected
    assert not [t.name for t in threading.enumerate() if t.name.startswith("crisp-")]
    assert pair.generate(named("fo"), "5%")[0].tokens == whole.tokens  # the model is as it was
