"""Generate text with a real model whose routed experts are in a store.

The model is transformers' own, and its own ``generate`` drives it. Time that is not an expert's is
in the layers' intervals: attention, routers, shared experts, and between two tokens the head and
the choice of the next token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crisp.adapter import RecordedRouting
from crisp.capture import stop_tokens
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.hardware.energy import Meter
from crisp.hardware.profile import HardwareProfile
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.devices.slots import Slots, slots_needed
from crisp.hw.executor import Executor
from crisp.hw.measured_run import measured_run
from crisp.hw.memory import return_freed_memory
from crisp.hw.model.offloaded import OffloadedExperts
from crisp.hw.model.resident import ResidentModel
from crisp.hw.store.reader import Store
from crisp.hw.telemetry.metering import metering, power_model
from crisp.policy import Budget, Policy
from crisp.policy.prefetch import PROFILE
from crisp.profile import Profile
from crisp.run.case import Case, Conditions, check_times
from crisp.run.result import Run
from crisp.run.timeline import Recorder, Sink
from crisp.scheduler.scheduler import EventScheduler
from crisp.text_windows import opening_ids
from crisp.trace import DECODE, PREFILL, Header, RoutingTrace

_CUT = "�"  # a tokenizer's text for a character whose last token is still to come
_BEFORE = 5  # tokens of the prompt that the first new ones are decoded with


@dataclass(frozen=True, eq=False)
class GeneratedText:
    """A generated text, and the run that generated it."""

    run: Run
    text: str
    tokens: tuple[int, ...]  # the one that ended the text included
    trace: RoutingTrace  # of all tokens that were fed: the prompt's, and all new ones but the last


def generate(
    model: ResidentModel,
    policy: Policy,
    budget: Budget,
    options: DeviceOptions,
    prompt: str,
    max_new_tokens: int,
    *,
    profile: Profile | None = None,
    split: str | None = None,
    conditions: Conditions | None = None,
    hardware: HardwareProfile | None = None,
    meter: Meter | None = None,
    modelled_energy: bool = False,
    sinks: Sequence[Sink] = (),
    on_text: Callable[[str], None] = lambda text: None,
    watch: Callable[[EventScheduler], None] | None = None,
) -> GeneratedText:
    """Continue ``prompt`` greedily, by at most ``max_new_tokens``.

    profile: counts of combinations, for widths and caches that need them; split: the text that says
    where they are from. conditions: their phase is taken to be ``all``, their batch 1. hardware:
    gives times to orders that need them, and power figures with modelled_energy; else energy is the
    meter's. on_text: called with each new piece of text. watch: called with the scheduler when an
    event is over.

    Raises CrispError for arguments that do not fit together, and for a device that fails; the text
    that ``on_text`` was given until then is right.
    """
    check_arguments(policy, profile, hardware, max_new_tokens)
    ids = prompt_tokens(model, prompt, max_new_tokens)
    case = empty_case(model.store, policy, budget, profile, split, conditions or Conditions())
    cost, power = case.order_cost(hardware), power_model(hardware, modelled_energy)
    scheduler, recorder = case.scheduler(cost), Recorder(sinks)
    needed = slots_needed(case.spec, case.capacity(), scheduler.ahead is not None)
    writer = TextWriter(model.loaded.tokenizer, ids, on_text)
    with closing(options.open(model.store, needed)) as device, metering(meter, power) as metered:
        executor = Executor(case.spec, scheduler, device, Slots(case.spec, needed), recorder, watch)
        offloaded = OffloadedExperts(model, case, executor, len(ids), metered.sample)
        with _threads(options.computing) as one_thread, offloaded.attached():
            executor.preload()
            return_freed_memory()
            metered.start(executor.zero)
            writer.after_prompt = one_thread
            _write(model, ids, max_new_tokens, case.conditions.chunk, writer)
            offloaded.end()
        total_ns = executor.finish()
        metered.stop()
        description = options.describe(device)
    about = f"prompt sha256:{hashlib.sha256(prompt.encode()).hexdigest()}"
    case = replace(case, trace=_trace(model, offloaded.routing(), len(ids), about))
    run = measured_run(
        case,
        description,
        model.store.describe(),
        hardware if cost or power else None,
        executor,
        total_ns,
        offloaded.skipped,
        metered.energy,
        offloaded.lookup_ns,
    )
    return GeneratedText(run, writer.text, tuple(writer.new), case.trace)


def check_arguments(
    policy: Policy,
    profile: Profile | None,
    hardware: HardwareProfile | None,
    max_new_tokens: int,
) -> None:
    """Raise CrispError for arguments that `generate` refuses; needs no model."""
    for needs, what in (
        (policy.width.counted, f"width {policy.width_name}"),
        (policy.cache.profiled, f"cache {policy.cache.name}"),
    ):
        if needs and profile is None:
            raise CrispError(
                f"policy {policy.name}: {what} needs counts of combinations; give --metadata FILE, "
                "as crisp prepare writes it"
            )
    if policy.oracle:
        raise CrispError(
            f"policy {policy.name}: {policy.oracle} is an oracle, and nobody knows what will be "
            "generated; crisp simulate takes it, with a trace"
        )
    if policy.prefetch.source == PROFILE:
        raise CrispError(
            f"policy {policy.name}: prefetch {policy.prefetch.name} asks a trace which experts "
            "follow which, and there is none; none, previous or guess was expected"
        )
    check_times(policy, hardware)
    if max_new_tokens < 1:
        raise CrispError(f"--max-new-tokens {max_new_tokens}: expected 1 or more")


def empty_case(
    store: Store,
    policy: Policy,
    budget: Budget,
    profile: Profile | None,
    split: str | None,
    conditions: Conditions,
) -> Case:
    """Return the case of a generation, with an empty trace: its rows are known afterwards."""
    spec = store.spec
    none = np.zeros(0, np.int32)
    trace = RoutingTrace(
        experts=np.zeros((0, spec.n_layers, spec.top_k), np.int16),
        sequence=none,
        position=none,
        phase=none.astype(np.uint8),
        header=Header(n_experts=spec.n_experts, top_k=spec.top_k, ordered=True, origin="captured"),
    )
    return Case(
        trace=trace,
        spec=spec,
        policy=policy,
        budget=budget,
        profile=profile or Profile.empty(spec),
        conditions=replace(conditions, phase="all", batch=1, limit=None),
        split=split,
    )


def _trace(
    model: ResidentModel, routing: RecordedRouting, prompt: int, about: str | None
) -> RoutingTrace:
    """Return the routing of one sequence, whose first ``prompt`` tokens were given, as a trace."""
    loaded, spec = model.loaded, model.store.spec
    position = np.arange(len(routing.experts), dtype=np.int32)
    header = Header(
        model=loaded.name,
        config_hash=spec.config_hash,
        n_experts=spec.n_experts,
        top_k=spec.top_k,
        dataset=about,
        tokenizer=f"{loaded.name}, {len(loaded.tokenizer)} tokens",
        origin="captured",
        ordered=True,
        spec=spec.to_dict(),
        note=f"a prompt of {prompt} tokens, continued greedily; {loaded.how}",
    )
    return RoutingTrace(
        experts=routing.experts,
        sequence=np.zeros(len(position), np.int32),
        position=position,
        phase=np.where(position < prompt, PREFILL, DECODE).astype(np.uint8),
        weights=routing.weights.astype(np.float16),
        guess=routing.guess if (routing.guess >= 0).any() else None,
        magnitudes=routing.magnitudes,
        header=header,
    )


def prompt_tokens(model: ResidentModel, prompt: str, max_new_tokens: int) -> list[int]:
    """Return the prompt's tokens; CrispError for none, too many, or another model's tokenizer."""
    tokenizer, config = model.loaded.tokenizer, model.loaded.model.config.get_text_config()
    ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    ids = [*opening_ids(tokenizer), *ids]
    if not ids:
        raise CrispError("--prompt: has no tokens, expected a text to continue")
    if max(ids) >= config.vocab_size:
        raise CrispError(
            f"{model.loaded.name}: its tokenizer gives token {max(ids)}, but the model knows "
            f"{config.vocab_size} tokens"
        )
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and len(ids) + max_new_tokens > context:
        raise CrispError(
            f"--prompt of {len(ids)} tokens and --max-new-tokens {max_new_tokens}: the model's "
            f"context is {context}"
        )
    return ids


def _write(
    model: ResidentModel,
    prompt: list[int],
    max_new_tokens: int,
    chunk: int | str,
    writer: TextWriter,
) -> None:
    """Let transformers drive the model: greedily, the prompt in chunks, or at once."""
    torch, transformers = import_extra("torch"), import_extra("transformers")
    loaded = model.loaded.model
    ends = sorted(stop_tokens(model.loaded))
    greedy = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        prefill_chunk_size=chunk if isinstance(chunk, int) and len(prompt) > chunk else None,
    )
    ids = torch.tensor([prompt], device=loaded.device)
    # the model's own configuration would fill in what this one leaves open, as for repetition
    published, loaded.generation_config = loaded.generation_config, greedy
    try:
        loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=greedy,
            streamer=writer,
        )
    finally:
        loaded.generation_config = published


class TextWriter:
    """A streamer of transformers' that decodes new tokens and passes on the text that they add."""

    def __init__(self, tokenizer: Any, prompt: list[int], on_text: Callable[[str], None]) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._ids = list(prompt)
        self._prompt = len(prompt)
        # Decoding depends on the tokens before: new text is what [_from:] adds to [_from:_passed].
        self._from, self._passed = max(0, len(prompt) - _BEFORE), len(prompt)
        self._is_prompt = True
        self.after_prompt: Callable[[], None] = lambda: None  # called with the first new one
        self.text = ""

    @property
    def new(self) -> list[int]:
        """The tokens after the prompt."""
        return self._ids[self._prompt :]

    def put(self, tokens: Any) -> None:
        """Take the prompt's tokens at the first call, then one new token at each call."""
        if self._is_prompt:
            self._is_prompt = False
            return
        if len(self._ids) == self._prompt:
            self.after_prompt()
        self._ids += tokens.flatten().tolist()
        self._pass_on(cut=False)

    def end(self) -> None:
        """Pass on what is left."""
        self._pass_on(cut=True)

    def _pass_on(self, cut: bool) -> None:
        """Pass on the new text; with ``cut`` also a character whose last token is missing."""
        before = self._decode(self._ids[self._from : self._passed])
        whole = self._decode(self._ids[self._from :])
        if len(whole) > len(before) and (cut or not whole.endswith(_CUT)):
            self._from, self._passed = self._passed, len(self._ids)
            self.text += whole[len(before) :]
            self._on_text(whole[len(before) :])

    def _decode(self, ids: list[int]) -> str:
        """Return the text of some tokens."""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


@contextmanager
def _threads(number: int) -> Iterator[Callable[[], None]]:
    """Let torch compute the model itself with so many threads, within the block.

    Yields a function that makes them one, for single tokens: torch's threads wait at work for a
    while, on the cores that the experts' threads need. On two cores a layer of a small model took
    38 ms with them and 11 ms without.
    """
    torch = import_extra("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield lambda: torch.set_num_threads(1)
    finally:
        torch.set_num_threads(before)
