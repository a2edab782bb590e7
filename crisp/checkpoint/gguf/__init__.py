"""GGUF files, as llama.cpp reads them: their header, the geometry in it, and experts' weights."""

from crisp.checkpoint.gguf.experts import GgufExperts, gguf_activation
from crisp.checkpoint.gguf.geometry import GgufModel, read_geometry, read_model
from crisp.model.gguf_header import GgufHeader, gguf_file, read_header, refuse_gguf

__all__ = [
    "GgufExperts",
    "GgufHeader",
    "GgufModel",
    "gguf_activation",
    "gguf_file",
    "read_geometry",
    "read_header",
    "read_model",
    "refuse_gguf",
]
