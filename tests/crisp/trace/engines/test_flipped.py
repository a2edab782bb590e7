"""Logs with bytes changed, cut off or repeated: a trace that is valid, or one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from crisp.errors import CrispError
from crisp.trace.importing.engines import EngineLog, read_log
from tests.crisp.trace.engines import (
    test_cache_eval,
    test_colibri,
    test_llamacpp,
    test_policylang,
    test_vllm,
)
from tests.crisp.trace.engines.reading import routing

SIZES = {"n_experts": 16, "n_layers": 3, "top_k": 2}
LOGS: dict[str, Callable[[Path], Path]] = {}


def log(engine: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(write: Callable[[Path], None]) -> Callable[[Path], None]:
        def written(folder: Path) -> Path:
            path = folder / write.__name__.replace("_DOT_", ".")
            write(path)
            return path

        LOGS[f"{engine} {write.__name__}"] = written
        return write

    return add


@log("vllm")
def response_DOT_json(path: Path) -> None:
    experts = routing().experts
    choice = {"routed_experts": test_vllm.encoded(experts)}
    usage = {"prompt_tokens": 4, "completion_tokens": 4}
    path.write_text(json.dumps({"usage": usage, "choices": [choice]}))


@log("vllm")
def loads_DOT_jsonl(path: Path) -> None:
    record = {"expert_load": [[3, 4], [5, 6]], "p2l_map": [[0, 1], [1, 0]]}
    path.write_text(json.dumps({"record_type": "eplb_load_stats"} | record) + "\n")


@log("array")
def a_DOT_npy(path: Path) -> None:
    np.save(path, routing().experts.astype(np.int16))


@log("array")
def a_DOT_npz(path: Path) -> None:
    np.savez_compressed(path, routed_experts=routing().experts)


@log("moe-infinity")
def counts_DOT_npy(path: Path) -> None:
    np.save(path, np.ones((2, 3, 16)))


@log("router-logits")
def logits_DOT_npz(path: Path) -> None:
    np.savez(path, *np.random.default_rng(0).normal(size=(3, 5, 16)))


@log("llama.cpp")
def trace_DOT_csv(path: Path) -> None:
    test_llamacpp.write(path, test_llamacpp.trace_lines(routing().experts, 3))


@log("llama.cpp")
def imatrix_DOT_gguf(path: Path) -> None:
    name = "blk.0.ffn_up_exps.weight.counts"
    path.write_bytes(test_llamacpp.gguf({name: np.arange(8).reshape(1, 8)}))


@log("colibri")
def stream_DOT_txt(path: Path) -> None:
    path.write_text(test_colibri.stream(*routing(), [4, 1, 1, 1]))


@log("colibri")
def usage_DOT_txt(path: Path) -> None:
    path.write_text("-1 3 16\n-2 1 99\n0 1 7\n1 3 5\n2 9 5\n")


@log("moe-policylang")
def lines_DOT_jsonl(path: Path) -> None:
    test_policylang.write(path, test_policylang.HEADER, test_policylang.entries(*routing()))


@log("moe-policylang")
def table_DOT_parquet(path: Path) -> None:
    names = {"p": "prompt_id", "t": "token_idx", "l": "layer_idx", "e": "selected_experts"}
    frame = pd.DataFrame(test_policylang.entries(*routing()))
    frame.rename(columns=names).to_parquet(path)


@log("moe-cache-eval")
def events_DOT_safetensors(path: Path) -> None:
    save_file(test_cache_eval.events(*routing(), [4, 1, 1, 1]), path)


@pytest.mark.seconds
@pytest.mark.parametrize("name", LOGS)
def test_a_broken_log_is_a_valid_trace_or_one_line(tmp_path: Path, name: str) -> None:
    engine = name.split()[0]
    if "gguf" in name:
        pytest.importorskip("gguf")
    path = LOGS[name](tmp_path)
    whole = path.read_bytes()
    assert read_log([path], engine, **SIZES)
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(120):
        data = bytearray(whole)
        for _ in range(int(random.integers(1, 4))):
            at = int(random.integers(len(data)))
            match random.integers(4):
                case 0:
                    data[at] = int(random.integers(256))
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = data[at : at + 40]
                case _:
                    data[at : at + 1] = str(10 ** int(random.integers(25))).encode()
            data = data or bytearray(whole)
        path.write_bytes(data)
        try:
            log = read_log([path], engine, **SIZES)
        except CrispError as error:
            assert "\n" not in str(error)
            assert str(path) in str(error)
            refused += 1
        else:
            if isinstance(log, EngineLog):
                log.trace.validate("t")
            else:
                assert log.counts.min() >= 0
    assert refused > 20
