"""The expert store: routed experts in blocks on disk, written once, read block by block."""
