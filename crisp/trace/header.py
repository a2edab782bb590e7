"""Header: what a trace file says about where its routing comes from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from crisp.errors import CrispError
from crisp.version import TOOL

VERSION = 1
_FORMAT = "crisp-trace"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Header:
    """The provenance of a trace. What is unknown is None here and absent from the file."""

    n_experts: int  # routed experts of a MoE layer
    top_k: int  # experts recorded of a token and layer
    ordered: bool  # each row's experts are sorted by falling router weight
    origin: str  # 'captured', 'imported' or 'synthetic'
    seed: int | None = None  # of a synthetic trace, or of sampling
    model: str | None = None
    revision: str | None = None
    config_hash: str | None = None
    dataset: str | None = None
    tokenizer: str | None = None
    spec: dict[str, Any] | None = None  # ModelSpec.to_dict() of the traced model
    note: str | None = None
    version: int = VERSION
    tool: str = TOOL
    time: str = field(default_factory=_now)

    def to_metadata(self) -> dict[str, str]:
        """Return the header as safetensors metadata: text as it is, everything else as JSON."""
        values = {key: value for key, value in vars(self).items() if value is not None}
        text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
        return {"format": _FORMAT, **text}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], name: str) -> Header:
        """Return the header that `to_metadata` wrote.

        name: of the file, for errors. Raises CrispError for another format or version, or a
        missing or malformed field.
        """
        if metadata.get("format") != _FORMAT:
            raise CrispError(f"{name}: not a routing trace (its metadata has no {_FORMAT} format)")
        if metadata.get("version") != str(VERSION):
            version = metadata.get("version")
            raise CrispError(f"{name}: trace format version {version}; this reads {VERSION}")
        values: dict[str, Any] = {}
        for key in dataclasses.fields(cls):
            text = metadata.get(key.name)
            kind = str(key.type).removesuffix(" | None")
            if text is None:
                if str(key.type) == kind:
                    raise CrispError(f"{name}: header lacks '{key.name}'")
                continue
            values[key.name] = text if kind == "str" else _decode(text, kind, key.name, name)
        return cls(**values)


def _decode(text: str, kind: str, key: str, name: str) -> Any:
    """Return the JSON value of a header field, whose annotation is ``kind``."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if type(value) is not {"int": int, "bool": bool}.get(kind, dict):
        raise CrispError(f"{name}: header: {key} is '{text}'; expected {kind.split('[')[0]}")
    return value
