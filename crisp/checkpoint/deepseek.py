"""DeepSeek-MoE-16B (``model_type: deepseek``), for which transformers has no class.

Plain Llama attention; the first layers have a dense FFN, the others routed experts beside shared
ones. Everything but the MoE block and the choice of FFN is transformers' own. The experts are its
common experts module, so that whatever works with that works with this model as well.
"""

from __future__ import annotations

from typing import Any

from crisp.errors import CrispError
from crisp.extras import import_extra

FAMILY = "deepseek"  # the model_type


def register() -> None:
    """Register ``deepseek`` with AutoConfig and AutoModelForCausalLM, with its published names.

    The checkpoint's one tensor per expert is fused on loading and split again by
    ``save_pretrained``. Reading a config whose router scores are not softmax raises CrispError.
    Calling this again has no effect, nor has it where transformers knows the family itself.
    """
    for package in ("torch", "transformers"):
        import_extra(package)
    import transformers

    if FAMILY in transformers.CONFIG_MAPPING:
        return
    from torch import nn
    from transformers import conversion_mapping as conversion
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.olmoe import modeling_olmoe as olmoe
    from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen
    from transformers.utils.output_capturing import OutputRecorder

    class DeepseekConfig(transformers.LlamaConfig):  # type: ignore[misc]
        """Llama's config fields and those of the experts; defaults as published."""

        model_type = FAMILY
        attribute_map = {  # noqa: RUF012 -- as in every config of transformers
            "num_experts": "n_routed_experts",
            "router_aux_loss_coef": "aux_loss_alpha",
        }
        moe_intermediate_size: int = 1408
        n_routed_experts: int = 64
        n_shared_experts: int | None = None
        num_experts_per_tok: int = 6
        first_k_dense_replace: int = 0
        moe_layer_freq: int = 1
        norm_topk_prob: bool = False
        scoring_func: str = "softmax"
        aux_loss_alpha: float = 0.001
        output_router_logits: bool = False

        def __post_init__(self, **kwargs: object) -> None:
            super().__post_init__(**kwargs)
            if self.scoring_func != "softmax":
                raise CrispError(
                    f"model_type deepseek: scoring_func {self.scoring_func!r} is not understood; "
                    "'softmax' was expected"
                )

    class DeepseekMoe(nn.Module):  # type: ignore[misc]
        """MoE block: softmax of the router in float32, top k as they are, plus shared experts."""

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.gate = qwen.Qwen2MoeTopKRouter(config)
            self.experts = qwen.Qwen2MoeExperts(config)
            shared = config.moe_intermediate_size * (config.n_shared_experts or 0)
            self.shared_experts = qwen.Qwen2MoeMLP(config, shared) if shared else None

        def forward(self, hidden: Any) -> Any:
            rows = hidden.view(-1, hidden.shape[-1])  # [batch * positions, d]
            _, weights, index = self.gate(rows)  # [batch * positions, k] each
            routed = self.experts(rows, index, weights).view_as(hidden)
            return routed if self.shared_experts is None else routed + self.shared_experts(hidden)

    class DeepseekLayer(llama.LlamaDecoderLayer):  # type: ignore[misc]
        """Llama's decoder layer with an MoE block as FFN where the config says so."""

        def __init__(self, config: Any, index: int) -> None:
            super().__init__(config, index)
            if index >= config.first_k_dense_replace and index % config.moe_layer_freq == 0:
                self.mlp = DeepseekMoe(config)

    class DeepseekBase(qwen.Qwen2MoePreTrainedModel):  # type: ignore[misc]
        config_class = DeepseekConfig
        _no_split_modules = ["DeepseekLayer"]  # noqa: RUF012
        _can_record_outputs = {  # noqa: RUF012
            "router_logits": OutputRecorder(qwen.Qwen2MoeTopKRouter, index=0),
            "hidden_states": DeepseekLayer,
            "attentions": llama.LlamaAttention,
        }

        @classmethod
        def _can_set_experts_implementation(cls) -> bool:
            return True  # transformers looks for the decorator in this file, where it is not

    class DeepseekModel(DeepseekBase, olmoe.OlmoeModel):  # type: ignore[misc]
        """OLMoE's forward (causal attention without a window) over DeepSeek's layers."""

        def __init__(self, config: Any) -> None:
            transformers.PreTrainedModel.__init__(self, config)
            pad, d = config.pad_token_id, config.hidden_size
            self.embed_tokens = nn.Embedding(config.vocab_size, d, pad)
            self.layers = nn.ModuleList(
                DeepseekLayer(config, index) for index in range(config.num_hidden_layers)
            )
            self.norm = llama.LlamaRMSNorm(d, eps=config.rms_norm_eps)
            self.rotary_emb = llama.LlamaRotaryEmbedding(config=config)
            self.gradient_checkpointing = False
            self.post_init()

    class DeepseekForCausalLM(DeepseekBase, olmoe.OlmoeForCausalLM):  # type: ignore[misc]
        """Model and head; OLMoE's forward, which adds the loss that balances experts."""

        def __init__(self, config: Any) -> None:
            transformers.PreTrainedModel.__init__(self, config)
            self.model = DeepseekModel(config)
            self.vocab_size = config.vocab_size
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.router_aux_loss_coef = config.router_aux_loss_coef
            self.num_experts = config.num_experts
            self.num_experts_per_tok = config.num_experts_per_tok
            self.post_init()

    # The names on disk are those of Qwen2-MoE: `mlp.experts.N.{gate,up,down}_proj.weight`.
    names = conversion.get_checkpoint_conversion_mapping("qwen2_moe")
    conversion.register_checkpoint_conversion_mapping(FAMILY, names, overwrite=True)
    transformers.AutoConfig.register(FAMILY, DeepseekConfig)
    transformers.AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)
