"""A transformers model whose routed experts come from a store."""
