"""The cpu device: experts on disk, cached in memory, computed by the processor."""
