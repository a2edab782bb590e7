"""Import of long tables: what ends up where, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.trace import RoutingTrace
from crisp.trace.importing import survey
from crisp.trace.importing.table import Imported, import_table

Row = dict[str, Any]


def rows(tokens: dict[int, range], layers: tuple[int, ...] = (0, 1), k: int = 2) -> list[Row]:
    """A table of 8 experts: of each sequence these tokens, the first of which is prefill."""
    table = []
    for sequence, positions in tokens.items():
        for token in positions:
            for layer in layers:
                row = {"sequence": sequence, "token": token, "layer": layer}
                row |= {f"e{rank}": (sequence + token + 3 * layer + rank) % 8 for rank in range(k)}
                row |= {f"w{rank}": 2.0**-rank / (1 + layer) for rank in range(k)}
                table.append(row | {"phase": int(token > positions[0])})
    return table


def write(path: Path, table: list[Row]) -> Path:
    frame = pd.DataFrame(table)
    if path.suffix == ".parquet":
        frame.to_parquet(path, row_group_size=5)
    elif path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return path


def run(path: Path, **options: Any) -> tuple[RoutingTrace, Imported]:
    out = path.with_name("out.trace.safetensors")
    if "spec" not in options:
        options = {"n_experts": 8, "n_layers": 2} | options
    done = import_table(path, out, **options)
    return RoutingTrace.load(out), done


def error(path: Path, **options: Any) -> str:
    out = path.with_name("out.trace.safetensors")
    before = sorted(path.parent.iterdir())
    if "spec" not in options:
        options = {"n_experts": 8, "n_layers": 2} | options
    with pytest.raises(CrispError) as caught:
        import_table(path, out, **options)
    assert "\n" not in str(caught.value)
    assert sorted(path.parent.iterdir()) == before, "something was left behind"
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


def test_a_table_by_hand(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "sequence,token,layer,e0,e1,w0,w1,phase\n"
        "4,10,0,1,2,.75,.25,0\n"
        "4,10,1,7,0,.5,.5,0\n"
        "4,11,0,3,1,.75,.25,1\n"
        "4,11,1,0,7,.25,.75,1\n"  # the second weighs more
        "2,0,0,5,6,.6,.4,1\n"  # not sorted by sequence
        "2,0,1,6,5,.6,.4,1\n"
    )
    trace, done = run(tmp_path / "t.csv", dataset="d", tokenizer="k")
    assert trace.sequence.tolist() == [2, 4, 4]
    assert trace.position.tolist() == [0, 10, 11]
    assert trace.phase.tolist() == [1, 0, 1]
    assert trace.experts.tolist() == [[[5, 6], [6, 5]], [[1, 2], [7, 0]], [[3, 1], [7, 0]]]
    assert trace.weights is not None
    assert trace.weights[2].tolist() == [[0.75, 0.25], [0.75, 0.25]]
    header = trace.header
    assert (header.origin, header.ordered, header.n_experts, header.top_k) == (
        "imported",
        True,
        8,
        2,
    )
    assert (header.dataset, header.tokenizer, header.model) == ("d", "k", None)
    assert (done.table_rows, done.rows, done.sequences, done.dropped) == (6, 3, 2, 0)
    assert done.notes == ("1 table row sorted by weight",)


def test_unordered_leaves_the_order_and_says_so(tmp_path: Path) -> None:
    table = rows({0: range(2)})
    table[0] |= {"w0": 0.25, "w1": 0.75}
    path = write(tmp_path / "t.csv", table)
    trace, done = run(path, unordered=True)
    assert not trace.header.ordered
    assert trace.experts[0, 0].tolist() == [0, 1]
    assert done.notes == ()
    assert run(path)[0].experts[0, 0].tolist() == [1, 0]


def test_equal_weights_keep_the_order_of_the_table(tmp_path: Path) -> None:
    table = rows({0: range(1)}, k=4)
    table[0] |= {"w0": 0.1, "w1": 0.3, "w2": 0.3, "w3": 0.3}
    trace, _ = run(write(tmp_path / "t.csv", table))
    assert trace.experts[0, 0].tolist() == [1, 2, 3, 0]


def test_without_weights_or_phases(tmp_path: Path) -> None:
    table = [
        {key: row[key] for key in ("sequence", "token", "layer", "e1", "e0")}
        for row in rows({0: range(2)})
    ]
    trace, done = run(write(tmp_path / "t.csv", table))
    assert trace.weights is None
    assert trace.header.ordered
    assert trace.experts[0].tolist() == [[0, 1], [3, 4]]
    assert trace.phase.tolist() == [1, 1]
    assert done.notes == ("no column 'phase': all taken as decode",)


def test_all_kinds_of_table_give_the_same_trace(tmp_path: Path) -> None:
    table = rows({3: range(4, 9), 9: range(3)}, k=3)
    lists = [
        {
            **{key: row[key] for key in ("sequence", "token", "layer", "phase")},
            "experts": [row["e0"], row["e1"], row["e2"]],
            "weights": [row["w0"], row["w1"], row["w2"]],
            "else": "ignored",
        }
        for row in table
    ]
    digests = {run(write(tmp_path / f"t{end}", table))[0].digest() for end in (".parquet", ".csv")}
    digests.add(run(write(tmp_path / "t.jsonl", table))[0].digest())
    digests.add(run(write(tmp_path / "t.ndjson", lists))[0].digest())
    assert len(digests) == 1


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_rows_may_come_in_any_order(tmp_path_factory, shuffler: random.Random) -> None:
    folder = tmp_path_factory.mktemp("order")
    table = rows({3: range(4, 9), 9: range(3), 4: range(2)})
    expected = run(write(folder / "t.csv", table))[0].digest()
    shuffler.shuffle(table)
    assert run(write(folder / "t.csv", table))[0].digest() == expected


def test_tokens_scattered_over_a_large_table_are_merged(tmp_path: Path, monkeypatch) -> None:
    table = rows({3: range(4, 9), 9: range(3), 4: range(2)})
    expected = run(write(tmp_path / "t.parquet", table))[0].digest()
    random.Random(0).shuffle(table)
    monkeypatch.setattr(survey, "_MERGE", 3)
    monkeypatch.setattr("crisp.trace.importing.sources._BATCH_ROWS", 4)
    assert run(write(tmp_path / "t.parquet", table))[0].digest() == expected


def test_empty_cells_and_short_lists_are_absent_experts(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "sequence,token,layer,e0,e1,w0,w1,phase\n0,0,0,1,2,.75,.25,1\n0,0,1,,3,,.5,1\n"
    )
    trace, _ = run(tmp_path / "t.csv")
    assert trace.experts.tolist() == [[[1, 2], [3, -1]]]
    assert trace.weights is not None
    assert trace.weights[0, 1].tolist() == [0.5, 0]
    (tmp_path / "t.jsonl").write_text(
        '{"sequence": 0, "token": 0, "layer": 0, "experts": [3], "weights": [1]}\n'
        '{"sequence": 0, "token": 0, "layer": 1, "experts": [1, 2, 5], "weights": [0.5, 0.25, 1]}\n'
    )
    trace, _ = run(tmp_path / "t.jsonl")
    assert trace.experts.tolist() == [[[3, -1, -1], [5, 1, 2]]]


def test_incomplete_tokens_are_refused_or_counted(tmp_path: Path) -> None:
    table = rows({0: range(3, 9), 6: range(2)})
    del table[1]  # of token 3, at the start: no gap
    del table[4]  # of token 5, in the middle
    path = write(tmp_path / "t.csv", table)
    assert error(path) == (
        "2 of 8 tokens lack a layer (the first: sequence 0, token 3 has 1 of 2); "
        "--drop-incomplete leaves them out"
    )
    trace, done = run(path, drop_incomplete=True)
    assert (done.dropped, done.rows, done.sequences) == (2, 6, 3)
    # Token 4 keeps number 0; 6 to 8 go on as sequence 7, after the last.
    assert trace.sequence.tolist() == [0, 6, 6, 7, 7, 7]
    assert trace.position.tolist() == [4, 0, 1, 6, 7, 8]
    assert trace.experts[3].tolist() == [[6, 7], [1, 2]]
    assert done.notes == (
        "2 tokens lack a layer: left out",
        "tokens are missing inside sequences: 1 new sequences begun",
    )


def test_gaps_are_refused_or_begin_a_new_sequence(tmp_path: Path) -> None:
    table = [row for row in rows({2: range(9), 1: range(3)}) if row["token"] not in (3, 6)]
    path = write(tmp_path / "t.csv", table)
    assert error(path) == (
        "sequence 2 goes from token 2 to 4; --drop-incomplete goes on there as a new sequence"
    )
    trace, _ = run(path, drop_incomplete=True)
    assert trace.sequence.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    assert trace.position.tolist() == [0, 1, 2, 0, 1, 2, 4, 5, 7, 8]


def test_nothing_left(tmp_path: Path) -> None:
    table = [row for row in rows({0: range(4)}) if row["layer"] == row["token"] % 2]
    path = write(tmp_path / "t.csv", table)
    assert error(path, drop_incomplete=True) == "every token lacks a layer; nothing is left"


def test_a_layer_twice(tmp_path: Path) -> None:
    table = rows({0: range(4)})
    path = write(tmp_path / "t.csv", [*table, table[4]])
    assert error(path) == "sequence 0, token 2 has a layer twice"
    table[5]["layer"] = 0  # layer 0 twice and 1 never: as many rows as expected
    assert error(write(path, table)) == "sequence 0, token 2 has a layer twice"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"e1": 8}, "e1 8 found; expected 0 to 7"),
        ({"e1": 70_000}, "e1 70000 found; expected 0 to 7"),
        ({"e1": -3}, "e1 -3 found; expected 0 to 7"),
        ({"e1": 6}, "row 2 (sequence 0, position 2), layer 1: experts [6, 6]; 6 twice"),
        ({"w1": -1.0}, "row 2 (sequence 0, position 2), layer 1: weight -1.0 found"),
        (
            {"w0": 1e6},
            "row 2 (sequence 0, position 2), layer 1: weight 1e+06 found; expected",
        ),
        ({"layer": 2}, "layer 2 found; expected 0 to 1"),
        ({"layer": -1}, "layer -1 found; expected 0 to 1"),
        ({"sequence": -1}, "sequence -1 found; expected 0 to 2147483647"),
        ({"token": 2**31}, "token 2147483648 found; expected 0 to 2147483647"),
        ({"phase": 2}, "phase 2 found; expected 0 to 1"),
        ({"phase": 0}, "a token is prefill in one layer and decode in another"),
    ],
)
def test_a_bad_value_is_one_line(tmp_path: Path, change: Row, message: str) -> None:
    table = rows({0: range(4)})
    assert (table[5]["e0"], table[5]["token"], table[5]["layer"]) == (5, 2, 1)
    table[5] |= {"e0": 6, "e1": 1} | change
    for end in (".csv", ".parquet", ".jsonl"):
        assert error(write(tmp_path / f"t{end}", table)).startswith(message)


@pytest.mark.parametrize("weight", ["nan", "NaN", "", "inf"])
def test_weights_that_are_missing_or_not_numbers(tmp_path: Path, weight: str) -> None:
    (tmp_path / "t.csv").write_text(
        f"sequence,token,layer,e0,e1,w0,w1\n0,0,0,1,2,.75,{weight}\n0,0,1,2,3,.5,.5\n"
    )
    found = "inf" if weight == "inf" else "nan"
    assert f"layer 0: weight {found} found" in error(tmp_path / "t.csv")


def test_a_list_of_weights_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"sequence": 0, "token": 0, "layer": 0, "experts": [1, 2], "weights": [1]}\n'
    )
    assert "layer 0: weight nan found" in error(tmp_path / "t.jsonl", n_layers=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its first line is empty; names of columns were expected"),
        ("sequence,token,e0\n0,0,1\n", "no column layer; found sequence, token, e0"),
        ("sequence,token,layer,e0,e2\n0,0,0,1,2\n", "columns e0.. end at e2, with gaps"),
        ("sequence,token,layer,e0,e1,w0\n0,0,0,1,2,1\n", "2 columns of experts, 1 of weights"),
        ("sequence,token,layer,e0\n", "holds no rows"),
        ("sequence,token,layer,e0\n0,0,0,x\n", "column e0 has 'x'; expected whole numbers"),
        ("sequence,token,layer,e0\n0,0,0,1.5\n", "column e0 has 1.5; expected whole numbers"),
        ("sequence,token,layer,e0,e0\n0,0,0,1,2\n", "has 2 columns called 'e0'"),
        ("sequence,token,layer,e0\n0,,0,1\n", "column token has an empty cell"),
        ("sequence,token,layer,e0\n0,0,0\n", "CSV parse error"),
    ],
)
def test_a_bad_csv_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    assert error(tmp_path / "t.csv", n_layers=1).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the first line is not a JSON object"),
        ("[1]\n", "the first line is not a JSON object"),
        ('{"sequence": 0, "token": 0, "layer": 0}\n', "no column e0; found"),
        ('{"sequence": 0, "token": 0, "layer": 0, "e0": 1}\n{"seq', "JSON parse error"),
        ('{"sequence": 0, "token": 0, "layer": 0, "e0": 1}\n[2]\n', "JSON parse error"),
        ('{"sequence": 0, "token": 0, "layer": 0, "experts": []}\n', "holds no experts"),
        (
            '{"sequence": 0, "token": 0, "layer": 0, "experts": [1], "weights": [1, 2]}\n',
            "a list of weights is longer",
        ),
    ],
)
def test_bad_json_lines_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    assert error(tmp_path / "t.jsonl", n_layers=1).startswith(message)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    assert error(tmp_path / "none.csv") == "no such file"
    (tmp_path / "t.xlsx").write_text("x")
    expected = "unknown kind of table; expected .parquet, .csv, .jsonl, .ndjson"
    assert error(tmp_path / "t.xlsx") == expected
    (tmp_path / "t.parquet").write_text("sequence,token\n" * 20)
    assert "arquet" in error(tmp_path / "t.parquet")
    frame = pd.DataFrame(rows({0: range(3)})).astype({"e0": bool})
    frame.to_parquet(tmp_path / "f.parquet")
    assert error(tmp_path / "f.parquet") == "column e0 is bool; expected whole numbers"


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", rows({0: range(99)}))
    path.write_bytes(path.read_bytes()[:-100])
    assert error(path)


# -- as other tools write tables -------------------------------------------------------------------


def plain(tmp_path: Path) -> str:
    """The digest of the table that the ones below hold in other types."""
    return run(write(tmp_path / "plain.csv", rows({0: range(2), 1: range(3)}, k=3)))[0].digest()


def frame_of(k: int = 3) -> pd.DataFrame:
    return pd.DataFrame(rows({0: range(2), 1: range(3)}, k=k))


NUMBERED = "sequences are text or large numbers: numbered from 0 to 1 as they appear"


@pytest.mark.parametrize(
    "ids",
    [
        ["cmpl-b", "cmpl-a"],
        [2**63, 2**63 + 1],  # unsigned hashes
        [-(2**62), 2**40],
        ["9223372036854775809", "1e5"],
        [2**31, 3],
    ],
)
@pytest.mark.parametrize("end", [".parquet", ".csv", ".jsonl"])
def test_request_ids_are_numbered_as_they_appear(tmp_path: Path, ids: list[Any], end: str) -> None:
    table = rows({0: range(2), 1: range(3)}, k=3)
    for row in table:
        row["sequence"] = ids[row["sequence"]]
    trace, done = run(write(tmp_path / f"t{end}", table))
    assert trace.digest() == plain(tmp_path)
    assert done.notes == (NUMBERED,)


def test_a_request_is_called_by_its_id_in_errors(tmp_path: Path) -> None:
    table = rows({0: range(2), 1: range(3)})
    for row in table:
        row["sequence"] = f"cmpl-{row['sequence']}"
    assert error(write(tmp_path / "t.csv", table[:-1])).startswith(
        "1 of 5 tokens lack a layer (the first: sequence cmpl-1, token 2 has 1 of 2)"
    )
    table[3]["sequence"] = None
    assert error(write(tmp_path / "t.parquet", table)) == "column sequence has an empty cell"


def test_whole_numbers_in_floating_point_and_as_text(tmp_path: Path) -> None:
    """As pandas writes a column of integers in which a cell is empty."""
    frame = frame_of()
    numbers = [name for name in frame if name[0] in "etlp"]
    for kind in ("float64", "float32", "uint64", "Int16", "str"):
        frame.astype(dict.fromkeys(numbers, kind)).to_parquet(tmp_path / "t.parquet")
        assert run(tmp_path / "t.parquet")[0].digest() == plain(tmp_path)
    frame.astype(dict.fromkeys(numbers, "float64")).to_csv(tmp_path / "t.csv", index=False)
    assert "0.0,1.0" in (tmp_path / "t.csv").read_text()
    assert run(tmp_path / "t.csv")[0].digest() == plain(tmp_path)
    frame.astype({"w0": str}).to_parquet(tmp_path / "t.parquet")
    assert run(tmp_path / "t.parquet")[0].digest() == plain(tmp_path)


def test_a_csv_of_a_spreadsheet(tmp_path: Path) -> None:
    """Spaces in the header, 15.0 beside empty cells, semicolons, a byte order mark."""
    expected = [[[1, 2], [3, -1]]]
    lines = ["sequence, token , layer,e0, e1", "0,0.0,0,1.0,2.0", "0,0,1,3.0,"]
    for apart in (",", ";", "\t"):
        text = "\r\n".join(line.replace(",", apart) for line in lines)
        (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n")
        assert run(tmp_path / "t.csv")[0].experts.tolist() == expected
    (tmp_path / "t.csv").write_text('"sequence","token","layer","e0"\n0,0,0,"1"\n')
    assert run(tmp_path / "t.csv", n_layers=1)[0].experts.tolist() == [[[1]]]


def test_lists_kept_as_text(tmp_path: Path) -> None:
    frame = frame_of()
    lists = frame[["sequence", "token", "layer", "phase"]].copy()
    for form in ("[{}, {}, {}]", "{} {} {}", "({};{};{})", " [ {} {}  {}] "):
        for name, letter in (("experts", "e"), ("weights", "w")):
            columns = [frame[f"{letter}{rank}"] for rank in range(3)]
            lists[name] = [form.format(*row) for row in zip(*columns, strict=True)]
        lists.to_parquet(tmp_path / "t.parquet")
        assert run(tmp_path / "t.parquet")[0].digest() == plain(tmp_path)
        lists.to_csv(tmp_path / "t.csv", index=False)
        assert run(tmp_path / "t.csv")[0].digest() == plain(tmp_path)
    lists.loc[0, "experts"] = "[]"
    lists.drop(columns="weights").to_parquet(tmp_path / "t.parquet")
    assert run(tmp_path / "t.parquet")[0].experts[0, 0].tolist() == [-1, -1, -1]
    lists.loc[0, "experts"] = "[1, two]"
    lists.to_parquet(tmp_path / "t.parquet")
    assert error(tmp_path / "t.parquet") == "column experts has 'two'; expected whole numbers"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("experts", [2.5, 1.5], "column experts has 2.5; expected whole numbers"),
        ("experts", ["a", "b"], "column experts has 'a'; expected whole numbers"),
        ("weights", ["n/a", "n/a"], "column weights has 'n/a'; expected numbers"),
        ("experts", 7, "column experts is int64; expected lists"),
        ("experts", None, "column experts: a row has no list"),
        ("token", "first", "column token has 'first'; expected whole numbers"),
        ("layer", 0.5, "column layer has 0.5; expected whole numbers"),
        ("phase", "decode", "column phase has 'decode'; expected whole numbers"),
        ("token", [1], "column token is list<"),
        ("sequence", [1], "column sequence is list<"),
    ],
)
def test_what_no_number_can_be_made_of(tmp_path: Path, name: str, value: Any, message: str) -> None:
    row = {"sequence": 0, "token": 0, "layer": 0, "experts": [1, 2], "weights": [0.5, 0.5]}
    table = [row | {"phase": 1, name: value}] * (1 if value is not None else 2)
    if value is None:
        table[0] = row | {"phase": 1}
    pd.DataFrame(table).to_parquet(tmp_path / "t.parquet")
    assert error(tmp_path / "t.parquet", n_layers=1).startswith(message)


def test_columns_that_are_called_otherwise(tmp_path: Path) -> None:
    frame = frame_of()
    experts = [f"e{rank}" for rank in range(3)]
    renamed = frame.rename(columns={"sequence": "problem_id", "token": "pos", "e1": "second"})
    renamed["sequence"] = "not this one"
    called = {"sequence": "problem_id", "token": "pos", "e1": "second"}
    for end in (".parquet", ".csv", ".jsonl"):
        path = write(tmp_path / f"t{end}", renamed.to_dict("records"))
        assert run(path, called=called)[0].digest() == plain(tmp_path)
    lists = frame.drop(columns=experts).assign(ids=frame[experts].to_numpy().tolist())
    lists = lists.drop(columns=["w0", "w1", "w2"])
    trace, _ = run(write(tmp_path / "l.jsonl", lists.to_dict("records")), called={"experts": "ids"})
    np.testing.assert_array_equal(trace.experts, run(tmp_path / "plain.csv")[0].experts)
    path = write(tmp_path / "t.csv", renamed.to_dict("records"))
    assert error(path, called={"sequence": "problem"}).startswith(
        "no column problem; found problem_id"
    )
    assert error(path, called={"token": "pos", "layer": "pos"}).startswith(
        "a column is named twice"
    )
    with pytest.raises(CrispError, match="unknown column 'tokens'; did you mean 'token'"):
        run(path, called={"tokens": "pos"})


def test_padding_is_left_out_and_told(tmp_path: Path) -> None:
    """A batch padded with -1 to equal length is the trace without the padding."""
    table = rows({0: range(2), 1: range(3)}, k=3)
    padding = rows({0: range(2, 4), 1: range(3, 4)}, k=3)
    for row in padding:
        row |= {"e0": -1, "e1": -1, "e2": -1, "w0": 0.0, "w1": 0.0, "w2": 0.0}
    for end in (".parquet", ".csv", ".jsonl"):
        trace, done = run(write(tmp_path / f"t{end}", [*table, *padding]))
        assert trace.digest() == plain(tmp_path)
        assert done.notes == ("3 tokens without any expert (padding): left out",)
        assert done.dropped == 0


def test_places_that_no_row_uses_are_left_out_and_told(tmp_path: Path) -> None:
    """Some engines have a fixed width, and -1 behind."""
    table = rows({0: range(2), 1: range(3)}, k=3)
    for row in table:
        row |= {"e3": row["e2"], "w3": row["w2"]} | {"e2": -1, "w2": 0.0}  # not even last
        row |= {"e4": -1, "w4": 0.0}
    for end in (".parquet", ".csv", ".jsonl"):
        trace, done = run(write(tmp_path / f"t{end}", table))
        assert trace.digest() == plain(tmp_path)
        assert done.notes[0] == "5 places for experts, of which a row uses 3 at most"
        assert (done.k, trace.header.top_k) == (3, 3)


def test_a_layer_without_an_expert_is_kept_and_told(tmp_path: Path) -> None:
    table = rows({0: range(3)})
    table[1] |= {"e0": -1, "e1": None}
    trace, done = run(write(tmp_path / "t.csv", table))
    assert trace.experts[0].tolist() == [[0, 1], [-1, -1]]
    assert done.notes == ("1 table row without an expert: nothing is run there",)
    for row in table[1::2]:  # of all tokens: the layer is dense
        row |= {"e0": -1, "e1": -1}
    trace, done = run(write(tmp_path / "t.csv", table))
    assert trace.moe_layers == (0,)
    assert done.notes == ("no rows of layer 1: taken as not MoE",)


def test_json_lines_have_the_keys_of_all_lines(tmp_path: Path) -> None:
    table = rows({0: range(2), 1: range(3)}, k=3)
    lines = [json.dumps(row) for row in table]
    only = {key: table[0][key] for key in ("sequence", "token", "layer", "e0", "e1", "e2", "phase")}
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([json.dumps(only), *lines[1:]]))
    assert "layer 0: weight nan found; expected a finite number" in error(path)
    lists = '{{"sequence":0,"token":{},"layer":0,"experts":[{}]{}}}\n'
    path.write_text(lists.format(0, "2, 11", "") + lists.format(1, "3, 5", ',"weights":[0.1,0.9]'))
    assert error(path, n_layers=1, n_experts=16) == "column weights: a row has no list, others have"


def test_keys_are_those_of_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crisp.trace.importing.sources._BLOCK_BYTES", 100)
    table = rows({0: range(2), 1: range(3)}, k=3)
    for row in table:
        row["sequence"] = 2**63 + row["sequence"] if row["sequence"] else 7
    trace, done = run(write(tmp_path / "t.jsonl", table))
    assert (trace.digest(), done.notes) == (plain(tmp_path), (NUMBERED,))


# -- with a model ----------------------------------------------------------------------------------


def deepseek() -> ModelSpec:
    """A small MoE whose first layer is dense."""
    return ModelSpec(
        name="small",
        n_layers=3,
        moe_layers=(1, 2),
        n_experts=8,
        top_k=2,
        d_model=64,
        d_ff=64,
        dtype_bits=16,
        bits=ModelSpec.named("mixtral-8x7b").bits,
        matrices=3,
        biases=False,
        dense_params=(1, 1, 1),
        block=16,
        config_hash="abc",
    )


def test_dense_layers_of_the_model_have_no_experts(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", rows({0: range(3)}, layers=(1, 2)))
    trace, done = run(path, spec=deepseek())
    assert trace.layers == 3
    assert trace.moe_layers == (1, 2)
    assert (trace.experts[:, 0] == -1).all()
    assert done.notes == ()
    header = trace.header
    assert (header.model, header.config_hash, header.spec) == ("small", "abc", deepseek().to_dict())
    assert ModelSpec.from_dict(header.spec) == deepseek()


def test_layers_that_do_not_fit_the_model(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", rows({0: range(3)}, layers=(0, 1, 2)))
    assert error(path, spec=deepseek()) == "layer 0 of small is not MoE"
    write(path, rows({0: range(3)}, layers=(1,)))
    assert error(path, spec=deepseek()) == "layer 2 of small is MoE, but has no rows"
    write(path, rows({0: range(3)}, layers=(1, 2, 3)))
    assert error(path, spec=deepseek()) == "layer 3 found; expected 0 to 2"


def test_without_a_model_layers_without_rows_are_said_to_be_dense(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", rows({0: range(3)}, layers=(1, 3)))
    trace, done = run(path, n_layers=4)
    assert trace.moe_layers == (1, 3)
    assert done.notes == ("no rows of layer 0, 2: taken as not MoE",)


def test_another_k_than_the_model_is_recorded_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", rows({0: range(3)}, layers=(1, 2), k=3))
    trace, done = run(path, spec=deepseek())
    assert trace.header.top_k == 3
    assert done.notes == (
        "small routes to 2 experts, the table has 3: "
        f"crisp simulate {tmp_path}/out.trace.safetensors --top-k 3 takes it as it is",
    )


def test_a_model_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", rows({0: range(3)}))
    for wrong, message in (
        ({"n_experts": None}, "expected a model, or the numbers of experts and layers"),
        ({"n_layers": None}, "expected a model, or the numbers of experts and layers"),
        ({"n_layers": 0}, "--layers 0: expected 1 to 16,384"),
        ({"n_experts": 40_000}, "--experts 40000: expected 1 to 32,767"),
    ):
        with pytest.raises(CrispError, match=message):
            import_table(path, tmp_path / "o", **({"n_experts": 8, "n_layers": 2} | wrong))


# -- real tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "experts", "layers", "dropped", "shape", "prefill", "sequences", "first"),
    [
        ("gpt-oss-20b__mmlu-gpqa-mix", 32, 24, 0, (36_090, 24, 4), 0, 94, 78),
        ("qwen3-30b-a3b-q4km-top6__single-prompt", 128, 48, 27, (129, 48, 6), 1, 1, 27),
        ("gemma4-26b-a4b-q4km-top6__single-prompt", 128, 30, 0, (157, 30, 6), 29, 1, 0),
        ("gpt-oss-120b-q4km-top2__single-prompt", 128, 36, 84, (65, 36, 2), 1, 1, 84),
    ],
)
def test_real_tables(
    shared: Path, tmp_path: Path, name, experts, layers, dropped, shape, prefill, sequences, first
) -> None:
    table, out = shared / "traces" / f"{name}.parquet", tmp_path / "t"
    size = {"n_experts": experts, "n_layers": layers}
    if dropped:  # the last layer was not run for all but the last prompt token
        with pytest.raises(CrispError, match=f"{dropped} of .* tokens lack a layer"):
            import_table(table, out, **size)
    done = import_table(table, out, drop_incomplete=True, **size)
    trace = RoutingTrace.load(out)
    assert trace.experts.shape == shape
    assert (done.dropped, done.sequences) == (dropped, sequences)
    assert int((trace.phase == 0).sum()) == prefill
    assert int(trace.position.min()) == first
    # A row picked from the table by pandas: the last token of the last sequence.
    frame = pd.read_parquet(table)
    last = frame[(frame["sequence"] == frame["sequence"].max())]
    last = last[last["token"] == last["token"].max()].sort_values("layer")
    ids = last[[f"e{rank}" for rank in range(shape[2])]].to_numpy()
    weights = last[[f"w{rank}" for rank in range(shape[2])]].to_numpy()
    np.testing.assert_array_equal(trace.experts[-1], ids)
    np.testing.assert_array_equal(trace.weights[-1], weights.astype(np.float16))
