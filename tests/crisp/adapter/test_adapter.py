from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crisp.adapter import RoutingRecorder, expert_layout, record_routing
from crisp.adapter.scores import to_scores
from crisp.errors import CrispError
from crisp.extras import import_extra

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
FINE = {"num_experts": 6, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 6}
# family -> (config, experts a token, layers without experts)
FAMILIES: dict[str, tuple[dict[str, Any], int, list[int]]] = {
    "mixtral": ({**LOCAL, "num_experts_per_tok": 2}, 2, []),
    "phimoe": ({**LOCAL, "num_experts_per_tok": 2}, 2, []),
    "gpt_oss": ({**LOCAL, "num_experts_per_tok": 3, "head_dim": 8}, 3, []),
    "olmoe": ({"num_experts": 6, "num_experts_per_tok": 3}, 3, []),
    "qwen2_moe": (
        {**FINE, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16},
        2,
        [],
    ),
    "qwen3_moe": (
        {**FINE, "num_experts_per_tok": 3, "head_dim": 8, "mlp_only_layers": [1]},
        3,
        [1],
    ),
    "deepseek_v2": ({**LATENT, "q_lora_rank": None}, 2, [0]),
    "deepseek_v3": ({**LATENT, "q_lora_rank": 16}, 2, [0]),
}


def build(family: str, implementation: str | None = None, **more: Any) -> Any:
    """A tiny random model of a family, float32, with routers that are sure of their choice."""
    sizes = FAMILIES[family][0] if family in FAMILIES else {}
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **sizes, **more})
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(config, experts_implementation=implementation).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model


def some_ids(rows: int = 2, columns: int = 9) -> Any:
    return torch.randint(3, 96, (rows, columns), generator=torch.Generator().manual_seed(1))


def state(model: Any) -> list[Any]:
    """What recording might leave behind in a model's modules."""
    return [model.config.to_dict()] + [
        (name, sorted(vars(m)), list(m._forward_hooks), list(m._forward_pre_hooks))
        for name, m in model.named_modules()
    ]


# -- one hook for all families ---------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recording_changes_no_bit_and_leaves_nothing(family: str, implementation: str) -> None:
    model = build(family, implementation)
    ids = some_ids()
    before = state(model)
    with torch.no_grad():
        alone = model(ids).logits
        random = torch.random.get_rng_state()
        with record_routing(model) as recorder:
            watched = model(ids).logits
            recorder.take()
        assert torch.equal(random, torch.random.get_rng_state())
        afterwards = model(ids).logits
    assert torch.equal(alone, watched)
    assert torch.equal(alone, afterwards)
    assert state(model) == before
    assert model.config._experts_implementation == implementation


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_what_transformers_calls_router_logits(family: str) -> None:
    """And look-ahead guesses, for which routers run once more, change nothing of them."""
    model = build(family)
    ids = some_ids()
    with torch.no_grad():
        expected = model.base_model(ids, output_router_logits=True).router_logits
        with record_routing(model, scores=True) as recorder:
            model(ids)
            recorded = recorder.take()
        with record_routing(model) as recorder:
            model(ids)
            assert recorder.take().scores is None
    assert recorded.scores is not None
    layers = [layer.index for layer in expert_layout(model).layers]
    for layer, logits in zip(layers, expected, strict=True):
        given = logits.reshape(-1, logits.shape[-1]).float().numpy()
        np.testing.assert_array_equal(recorded.scores[:, layer], given.astype(np.float16))
    dense = sorted(set(range(recorded.scores.shape[1])) - set(layers))
    assert not recorded.scores[:, dense].any()


def test_shares_become_logarithms_and_what_no_half_holds_is_refused() -> None:
    shares = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    scores = to_scores(shares, 4, "router")
    np.testing.assert_allclose(scores[0, :3], np.log([0.5, 0.25, 0.25]), atol=1e-3)
    assert np.isfinite(scores).all()
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]])
    np.testing.assert_array_equal(to_scores(logits, 4, "router"), logits.numpy())
    with pytest.raises(CrispError, match="router: its router gives a score that is no finite"):
        to_scores(torch.tensor([[1e6, 0.0]]), 2, "router")
    with pytest.raises(CrispError, match="router: its router scores 2 of 4 experts"):
        to_scores(torch.zeros(1, 2), 4, "router")


def test_the_implementation_that_was_set_runs_once_a_layer() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return batched_mm_experts_forward(*args)

    ALL_EXPERTS_FUNCTIONS.register("counted", counted)
    model = build("mixtral")
    model.set_experts_implementation("counted")
    with torch.no_grad(), record_routing(model) as recorder:
        model(some_ids())
        recorder.take()
    assert len(calls) == 3  # the guesses run none


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_recorded_is_what_the_experts_were_given(family: str) -> None:
    _, k, dense = FAMILIES[family]
    model = build(family)
    given: dict[int, Any] = {}
    for index, layer in enumerate(model.model.layers):
        for name, module in layer.named_modules():
            if name.endswith(".experts"):

                def keep(_: Any, args: Any, index: int = index) -> None:
                    given[index] = args[1:]

                module.register_forward_pre_hook(keep)
    with torch.no_grad(), record_routing(model) as recorder:
        model(some_ids())
        routing = recorder.take()

    assert routing.experts.shape == routing.guess.shape == (18, 3, k)
    assert sorted(set(range(3)) - set(given)) == dense
    for index in dense:
        assert (routing.experts[:, index] == -1).all()
        assert (routing.weights[:, index] == 0).all()
    for index, (ids, weights) in given.items():
        assert (np.diff(routing.weights[:, index], axis=1) <= 0).all()
        for row in range(18):
            pairs = zip(ids[row].tolist(), weights[row].tolist(), strict=True)
            ours = zip(routing.experts[row, index], routing.weights[row, index], strict=True)
            assert dict(pairs) == {int(e): float(w) for e, w in ours}
    first = min(given)
    assert (routing.guess[:, : first + 1] == -1).all()
    for index in set(given) - {first}:
        assert routing.guess[:, index].min() >= 0


def test_a_sentinel_is_no_expert_and_equal_weights_keep_the_routers_order() -> None:
    model = build("mixtral", num_hidden_layers=1)
    recorder = RoutingRecorder(expert_layout(model))
    index = torch.tensor([[6, 4], [5, 2], [1, 3]])  # of 6 experts: 6 means none
    weights = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.25, 0.75]])
    recorder.experts(0, torch.zeros(3, 32), index, weights, lambda: None)
    routing = recorder.take()
    assert routing.experts[:, 0].tolist() == [[4, -1], [5, 2], [3, 1]]
    assert routing.weights[:, 0].tolist() == [[1, 0], [0.5, 0.5], [0.75, 0.25]]

    recorder.experts(0, torch.zeros(3, 32), index + 1, weights, lambda: None)
    with pytest.raises(CrispError, match="chose expert 7 of 6"):
        recorder.take()


def test_layers_with_fewer_experts_a_token_are_padded() -> None:
    more = {"num_experts": 6, "moe_topk": [3, 1, 2], "head_dim": 8}
    model = build("hunyuan_v1_moe", **more)
    with torch.no_grad(), record_routing(model) as recorder:
        model(some_ids())
        routing = recorder.take()
    assert (routing.experts >= 0).sum(axis=2).tolist() == [[3, 1, 2]] * 18
    assert (routing.weights > 0).sum(axis=2).tolist() == [[3, 1, 2]] * 18
    assert (routing.guess >= 0).sum(axis=2).tolist() == [[0, 1, 2]] * 18


def test_layouts_name_their_layers() -> None:
    layout = expert_layout(build("qwen3_moe"))
    assert (layout.n_layers, layout.n_experts) == (3, 6)
    assert [layer.index for layer in layout.layers] == [0, 2]
    assert [layer.name for layer in layout.layers] == [
        "model.layers.0.mlp.experts",
        "model.layers.2.mlp.experts",
    ]


# -- the look-ahead guess --------------------------------------------------------------------------


def test_the_guess_is_the_next_router_on_this_blocks_input() -> None:
    model = build("mixtral")
    inputs: dict[int, Any] = {}
    for index, layer in enumerate(model.model.layers):

        def keep(_: Any, args: Any, output: Any, index: int = index) -> None:
            inputs[index] = output.reshape(-1, 32)

        layer.post_attention_layernorm.register_forward_hook(keep)
    with torch.no_grad(), record_routing(model) as recorder:
        model(some_ids())
        routing = recorder.take()
        for index, layer in enumerate(model.model.layers):
            scores = (inputs[index] @ layer.mlp.gate.weight.T).softmax(-1)
            real = scores.topk(2).indices.numpy()
            assert np.array_equal(routing.experts[:, index], real)
            if index:
                ahead = (inputs[index - 1] @ layer.mlp.gate.weight.T).softmax(-1)
                assert np.array_equal(routing.guess[:, index], ahead.topk(2).indices.numpy())
    assert not np.array_equal(routing.guess[:, 1:], routing.experts[:, 1:])


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "phimoe"])
def test_the_guess_is_right_where_nothing_changes_between_two_layers(family: str) -> None:
    model = build(family)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # every layer adds nothing to the stream
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        with record_routing(model) as recorder:
            model(some_ids())
            routing = recorder.take()
    later = [layer.index for layer in recorder.layout.layers[1:]]
    assert np.array_equal(routing.guess[:, later], routing.experts[:, later])
    assert len({tuple(row) for row in routing.experts[:, later].reshape(18, -1)}) > 1


def test_recorders_of_router_logits_and_other_hooks_see_nothing_of_the_guess() -> None:
    model = build("mixtral")
    ids = some_ids()
    seen: list[str] = []
    for name, module in model.named_modules():
        if name.endswith((".gate", ".mlp", ".experts")):
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    with torch.no_grad():
        alone = model(ids, output_router_logits=True)
        calls = list(seen)
        seen.clear()
        with record_routing(model) as recorder:
            watched = model(ids, output_router_logits=True)
            recorder.take()
    assert seen == calls
    assert len(watched.router_logits) == len(alone.router_logits) == 3
    for one, other in zip(alone.router_logits, watched.router_logits, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(alone.aux_loss, watched.aux_loss)


# -- what is not understood is refused -------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("llama", {}, "LlamaForCausalLM (model_type llama): has no routed experts"),
        ("jetmoe", {"num_local_experts": 4}, "its JetMoeParallelExperts does not use"),
    ],
)
def test_other_layouts_are_refused_by_name(family: str, more: dict[str, Any], message: str) -> None:
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **more})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(CrispError) as error:
        expert_layout(model)
    assert message in str(error.value)


def test_encoder_decoders_are_refused_and_of_models_of_images_the_text_part_is_taken() -> None:
    with torch.device("meta"):
        bart = transformers.BartForConditionalGeneration(
            transformers.BartConfig(encoder_layers=1, decoder_layers=1, d_model=16)
        )
        config = transformers.Qwen3VLMoeConfig()
        config.text_config.num_hidden_layers = config.vision_config.depth = 1
        vision = transformers.Qwen3VLMoeForConditionalGeneration(config)
    with pytest.raises(CrispError, match=r"BartForConditionalGeneration.*is an encoder-decoder"):
        expert_layout(bart)
    layout = expert_layout(vision)  # of its text part
    assert (layout.stack, layout.n_layers) == ("model.language_model.layers", 1)


def test_noise_of_training_is_refused() -> None:
    model = build("phimoe").train()
    with pytest.raises(CrispError, match="training mode"), record_routing(model):
        pass


def test_experts_that_run_twice_or_never_are_refused() -> None:
    model = build("mixtral")
    with torch.no_grad(), record_routing(model) as recorder:
        model(some_ids())
        with pytest.raises(CrispError, match="ran twice in one forward pass"):
            model(some_ids())
        recorder.take()
        with pytest.raises(CrispError, match="was not called"):
            recorder.take()


def test_a_module_that_cannot_be_loaded_is_not_called_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short_of_memory(name: str) -> None:
        raise ImportError(f"{name}.so: failed to map segment from shared object")

    monkeypatch.setattr("importlib.import_module", short_of_memory)
    with pytest.raises(CrispError, match=r"^torch cannot be loaded: torch\.so: failed to map"):
        import_extra("torch")
    with pytest.raises(CrispError, match=r"^no_such is needed and not installed: pip install"):
        import_extra("no_such.part")
