"""What quantised checkpoints cost: exactness, memory, and the quality of int4."""
