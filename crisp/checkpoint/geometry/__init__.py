"""A model's geometry, from its config and from its tensors' names, shapes and stored types."""
