"""Plugins by the command line: a copy of a built-in rule under another name changes nothing."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from crisp import extensions
from crisp.errors import CrispError, FormerNameWarning
from crisp.extensions import PluginFile, find_name, load_file
from crisp.plugins import register_cache, register_width
from crisp.policy import named
from crisp.policy.cache import CACHES
from crisp.policy.order import ORDERS
from crisp.sim.parallel import side_by_side
from tests.plugged import plugged

ROOT = Path(__file__).parents[3]
TINY = ROOT / "traces" / "tiny-mixtral"
Crisp = Callable[..., Any]
IMPORTS = "from crisp.plugins import *\n"
LRU = (
    IMPORTS
    + """
@register_cache("copied")
def victim(resident, protected, last, count, low, high):
    best = -1
    for entry in range(low, high):
        if resident[entry] > 0 and protected[entry] == 0 and (best < 0 or last[entry] < last[best]):
            best = entry
    return best
"""
)
UNIFORM = (
    IMPORTS
    + """
from dataclasses import dataclass
from fractions import Fraction
from crisp.policy.widths.base import WidthPolicy, table_of

@register_width("half")
@dataclass(frozen=True)
class Half(WidthPolicy):
    share: Fraction = Fraction(1, 2)

    def bind(self, spec, profile, ordered):
        return table_of(spec, profile, ordered, spec.width(self.share), spec.width(self.share))
"""
)
OTHERS = (
    IMPORTS
    + """
import inspect, types
from crisp.policy import eviction, order, prefetch

def copied(function):
    return types.FunctionType(function.__code__, function.__globals__, "copied")

register_cache("fifo-copy", last="stamp", admitted=copied(eviction.stamp_entry))(
    copied(eviction.lru_victim))
register_cache("slru-copy", last="stamp", count="mark", used=copied(eviction.promote),
    admitted=copied(eviction.on_probation))(copied(eviction.lfu_victim))
register_cache("random-copy", last="stamp", drawn=True)(copied(eviction.lru_victim))
register_cache("tier-aware-copy", count="mark", tiered=True)(copied(eviction.lfu_victim))
register_cache("suffix-lru-copy", suffixes=True)(copied(eviction.suffix_lru_victim))
register_cache("least-stale-copy", count="mark", used=copied(eviction.use_current), by_pass=True)(
    copied(eviction.lfu_victim))
register_order("widest-copy")(copied(order.widest_first))
register_order("random-copy", drawn=True)(copied(order.by_random_key))
register_order("johnson-copy", timed=True)(copied(order.johnson))
register_prefetcher("previous-copy")(copied(prefetch.last_used))
for source, name in (("router", "guess"), ("profile", "frequent"), ("future", "perfect")):
    register_prefetcher(name + "-copy", source=source)(copied(prefetch.predicted_experts))
"""
)


@pytest.fixture(autouse=True)
def restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with plugged():
        yield


def plugin(text: str, name: str = "mine.py") -> Path:
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


def simulated(crisp: Crisp, *options: object) -> dict[str, Any]:
    done = crisp("simulate", "tiny-mixtral-docs", "--limit", 60, "--json", "run.json", *options)
    assert (done.code, done.err) == (0, ""), done.err
    run: dict[str, Any] = json.loads(Path("run.json").read_text(encoding="utf-8"))
    return run


def without(run: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in run["settings"]["policy"].items() if key not in keys}


@pytest.mark.parametrize("engine", ["simpy", "fast"])
def test_a_cache_is_what_it_copies(crisp: Crisp, engine: str) -> None:
    given = ("--policy", "lru", "--budget", "40%", "--engine", engine)
    plain = simulated(crisp, *given)
    file = plugin(LRU)
    copied = simulated(crisp, *given, "--cache", "copied", "--plugin", file)
    assert copied["metrics"] == plain["metrics"]
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    policy = copied["settings"]["policy"]
    assert policy["plugins"] == f"mine.py sha256:{digest}"
    assert policy["cache"] == "copied"
    assert without(copied, "plugins", "cache") == without(plain, "cache")
    # a file that is there, but not used, changes no settings
    assert simulated(crisp, *given, "--plugin", file)["settings"] == plain["settings"]


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        *(("cache", name) for name in ("fifo", "slru", "random", "tier-aware", "least-stale")),
        ("cache", "suffix-lru"),
        *(("order", name) for name in ("widest", "random", "johnson")),
        *(("prefetch", name) for name in ("previous", "guess", "frequent", "perfect")),
    ],
)
def test_every_kind_of_rule_is_compiled_exactly(crisp: Crisp, part: str, rule: str) -> None:
    file = plugin(OTHERS)
    given = ("--policy", "lru", "--width", "tiered", "--budget", "40%", "--plugin", file)
    given = (*given, *(("--unit", "block") if rule == "suffix-lru" else ()))
    runs = [
        simulated(crisp, *given, f"--{part}", name, "--engine", engine)["metrics"]
        for name in (rule, f"{rule}-copy")
        for engine in ("simpy", "fast")
    ]
    assert runs[0]["hits"] > 0
    assert all(run == runs[0] for run in runs[1:])


def test_a_seed_of_a_rule_that_draws() -> None:
    load_file(plugin(OTHERS))
    policy = named("lru", order="random-copy(7)", cache="random-copy", seed=3).to_dict()
    assert (policy["order"], policy["cache"]) == ("random-copy(7)", "random-copy(3)")
    with pytest.raises(CrispError, match="unknown order 'widest-copy"):
        named("lru", order="widest-copy(7)")


def test_a_cache_and_a_width_on_a_device(crisp: Crisp) -> None:
    pytest.importorskip("torch")
    assert crisp("pack", TINY, "--block", 16, "--out", "store").code == 0
    cache, width = plugin(LRU), plugin(UNIFORM, "width.py")
    runs = {}
    for name, parts in {
        "lru": ("--policy", "lru"), "copied": ("--policy", "lru", "--cache", "copied"),
        "up": ("--policy", "up"), "half": ("--policy", "up", "--width", "half"),
    }.items():  # fmt: skip
        plugins = ("--plugin", cache, "--plugin", width)
        done = crisp(
            "replay", "tiny-mixtral-docs", "--store", "store", "--budget", "30%", "--limit", 20,
            "--json", "run.json", *parts, *plugins,
        )  # fmt: skip
        assert (done.code, done.err) == (0, "")
        runs[name] = json.loads(Path("run.json").read_text(encoding="utf-8"))
        if name in ("up", "half"):
            done = crisp(
                "generate", TINY, "--store", "store", "--budget", "30%", "--prompt", "def read(",
                "--max-new-tokens", 8, "--json", "said.json", *parts, *plugins,
            )  # fmt: skip
            assert done.code == 0, done.err
            runs[f"{name} generated"] = json.loads(Path("said.json").read_text(encoding="utf-8"))
            runs[f"{name} said"] = done.out.splitlines()[0]
    counts = ("tasks", "hits", "partial_hits", "blocks_loaded", "bytes_loaded", "skipped", "tokens")
    for one, other in (("lru", "copied"), ("up", "half"), ("up generated", "half generated")):
        a, b = (runs[name]["metrics"] for name in (one, other))
        assert [a[count] for count in counts] == [b[count] for count in counts]
        assert "plugins" in runs[other]["settings"]["policy"]
    assert runs["up said"] == runs["half said"]


def test_a_width_in_eval_and_simulate(crisp: Crisp) -> None:
    pytest.importorskip("torch")
    file = plugin(UNIFORM)
    given = ("--policy", "up", "--budget", "40%", "--plugin", file)
    runs = [simulated(crisp, *given, "--width", width) for width in ("uniform", "half")]
    assert runs[0]["metrics"] == runs[1]["metrics"]
    found = []
    for width in ("uniform", "half"):
        done = crisp(
            "eval", TINY, "--policy", "up", "--width", width, "--plugin", file, "--text",
            ROOT / "docs" / "worked-example.md", "--window", 128, "--json", "loss.json",
        )  # fmt: skip
        assert done.code == 0, done.err
        found.append(json.loads(Path("loss.json").read_text(encoding="utf-8")))
    numbers = [re.findall(r'"perplexity": ?([\d.]+)', json.dumps(one)) for one in found]
    assert numbers[0]
    assert numbers[0] == numbers[1]


def test_a_sweep_by_several_processes(crisp: Crisp, monkeypatch: pytest.MonkeyPatch) -> None:
    """They load the plugin themselves, and find what one process does."""
    file, rows = plugin(LRU), []
    for jobs, out in ((1, "one.parquet"), (2, "two.parquet")):
        done = crisp(
            "sweep", "--trace", "tiny-mixtral-docs", "--policy", "lru", "--cache", "lru,copied",
            "--budget", "20%,40%", "--limit", 40, "--out", out, "--jobs", jobs, "--plugin", file,
        )  # fmt: skip
        assert done.code == 0, done.err
        rows.append(pq.read_table(out).to_pylist())
    assert rows[0] == rows[1]
    assert [row["refused"] for row in rows[0]] == [None] * 4
    by_cache = {row["policy.cache"]: row for row in rows[0] if row["budget.asked"] == "40%"}
    assert by_cache["lru"]["total_ns"] == by_cache["copied"]["total_ns"]
    assert by_cache["lru"]["policy.plugins"] is None
    assert by_cache["copied"]["policy.plugins"].startswith("mine.py sha256:")
    assert by_cache["copied"]["engine"] == "fast"
    # another text under the same name: nothing of it is kept
    keys = {row["cell"] for row in rows[0]}
    extensions._files.clear()
    del CACHES["copied"], extensions._origins["cache", "copied"]
    plugin(LRU + "\n# changed\n")
    done = crisp(
        "sweep", "--trace", "tiny-mixtral-docs", "--policy", "lru", "--cache", "copied", "--budget",
        "40%", "--limit", 40, "--out", "new.parquet", "--jobs", 1, "--plugin", file,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert not keys & {row["cell"] for row in pq.read_table("new.parquet").to_pylist()}


def length(policy: Any) -> str:
    return str(policy.to_dict()["plugins"])


def test_objects_of_a_plugin_reach_other_processes() -> None:
    """A width's class lives in a file that only this process was given."""
    load_file(plugin(UNIFORM))
    policies = [named("up", width="half"), named("up", width="half(.25)")]
    with side_by_side(length, policies, jobs=2) as results:
        assert set(results) == {policies[0].to_dict()["plugins"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = = 1\n", "line 1: invalid syntax"),
        ("\n1 / 0\n", "line 2: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)\n", "line 1: SystemExit: 3"),
        (LRU.replace("copied", "lru"), "line 3: cache lru: the name is taken by crisp itself"),
        (LRU.replace("copied", "Mine"), "line 3: cache 'Mine': expected small letters, digits"),
        (LRU + LRU, "line 12: cache copied: the name is taken by mine.py"),
        (
            IMPORTS + "@register_width('half')\nclass Half: pass\n",
            "line 2: width half: expected a frozen dataclass that inherits WidthPolicy",
        ),
        (
            IMPORTS + "register_prefetcher('both', source='guess')",
            "line 2: prefetch both: source 'guess', expected router, profile or future",
        ),
    ],
)
def test_a_broken_file_is_one_line(crisp: Crisp, text: str, message: str) -> None:
    done = crisp("simulate", "tiny-mixtral-docs", "--policy", "lru", "--budget", "40%",
                 "--plugin", plugin(text))  # fmt: skip
    assert done.code == 2
    assert re.fullmatch(rf"error: --plugin mine\.py: {re.escape(message)}.*\n", done.err), done.err


def test_a_file_that_is_not_there(crisp: Crisp) -> None:
    done = crisp("simulate", "tiny-mixtral-docs", "--policy", "lru", "--budget", "40%",
                 "--plugin", "none.py")  # fmt: skip
    assert (done.code, done.err) == (2, "error: --plugin none.py: No such file or directory\n")


FAILING = (
    IMPORTS
    + """
@register_cache("fails")
def victim(resident, protected, last, count, low, high):
    return resident[high + 10**6]

@register_cache("wrong")
def wrong(resident, protected, last, count, low, high):
    return low if protected[low] else high - 1 if protected[high - 1] else -1

@register_cache("strange")
def strange(resident, protected, last, count, low, high):
    return object()
"""
)


def test_a_rule_that_fails_is_one_line(crisp: Crisp) -> None:
    given = ("simulate", "tiny-mixtral-docs", "--policy", "lru", "--budget", "20%", "--limit", 40,
             "--plugin", plugin(FAILING))  # fmt: skip
    done = crisp(*given, "--cache", "fails")
    assert done.code == 2
    assert re.fullmatch(r"error: --plugin .*/mine\.py: line 5: IndexError: .*\n", done.err)
    done = crisp(*given, "--cache", "wrong")
    assert done.code == 2
    assert "cache wrong: chose entry" in done.err
    done = crisp(*given, "--cache", "wrong", "--engine", "fast")
    assert (done.code, done.err) == (
        2, "error: a plugin's cache chose a victim that is protected or empty\n"
    )  # fmt: skip
    done = crisp(*given, "--cache", "strange", "--engine", "fast")
    assert done.code == 2
    assert re.fullmatch(
        r"error: engine fast: cannot compile cache strange: .*; use --engine simpy\n", done.err
    )


SHARE = "spec.width(self.share)"
WIDTH = UNIFORM.replace(
    f"        return table_of(spec, profile, ordered, {SHARE}, {SHARE})",
    """        return types.SimpleNamespace(
            residency=False, table=lambda: None, widths=lambda _, experts, *more: VALUE)""",
).replace("\nfrom dataclasses", "\nimport numpy as np, types\nfrom dataclasses", 1)


@pytest.mark.parametrize("engine", ["simpy", "fast"])
@pytest.mark.parametrize(
    ("part", "name", "text", "message"),
    [
        ("width", "half", WIDTH.replace("VALUE", "np.full(experts.shape, 99)"), "width half: .*99"),
        ("width", "half", WIDTH.replace("VALUE", "np.full(experts.shape, -3)"), "width half: .*-3"),
        ("width", "half", WIDTH.replace("VALUE", "experts * np.nan"), "width half: .*float"),
        ("width", "half", WIDTH.replace("VALUE", "None"), "width half: .*NoneType"),
        ("width", "half", WIDTH.replace("VALUE", "exit(0)"), "line 15: SystemExit: 0"),
        (
            "cache", "none-at-all", IMPORTS + "@register_cache('none-at-all')\n"
            "def victim(a, b, c, d, low, high):\n    return None\n", "cache none-at-all: ",
        ),
        (
            "order", "nan", IMPORTS + "@register_order('nan')\n"
            "def key(a, b, c, d):\n    return float('nan'), 1\n", "order nan: .*pair",
        ),
        (
            "prefetch", "far", IMPORTS + "@register_prefetcher('far')\n"
            "def far(predicted, used):\n    return [99]\n", "prefetch",
        ),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_one_line(
    crisp: Crisp, engine: str, part: str, name: str, text: str, message: str
) -> None:
    done = crisp("simulate", "tiny-mixtral-docs", "--policy", "lru", "--budget", "40%", "--limit",
                 40, "--engine", engine, f"--{part}", name, "--plugin", plugin(text))  # fmt: skip
    assert done.code == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", done.err)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@register_cache('few')\ndef victim(resident, protected):\n    return -1\n",
         r"cache few: victim\(resident, protected\) is called with 6 arguments: too many"),
        ("def note(mark): pass\n@register_cache('noted', used=note)\n"
         "def victim(*arrays):\n    return -1\n",
         r"cache noted: note\(mark\) is called with 8 arguments: too many"),
        ("@register_order('more')\ndef key(a, b, c, d, e):\n    return 0, 0\n",
         r"order more: key\(a, b, c, d, e\) is called with 4 arguments: missing .* 'e'"),
        ("@register_prefetcher('far')\ndef far():\n    return []\n",
         r"prefetch far: far\(\) is called with 2 arguments: too many"),
        ("@register_importer('none')\ndef read():\n    return {}\n",
         r"importer none: read\(\) is called with 1 argument: too many"),
        ("@register_device('none')\ndef opened(*, store):\n    return store\n",
         r"device none: opened\(\*, store\) is called with 3 arguments: "),
        ("@register_layout('none')\ndef find(name):\n    return None\n",
         r"layout none: find\(name\) is called with 2 arguments: too many"),
    ],
)  # fmt: skip
def test_a_function_of_other_arguments_is_refused_as_it_is_registered(
    text: str, message: str
) -> None:
    with pytest.raises(CrispError, match=rf"^--plugin mine.py: line \d+: {message}"):
        load_file(plugin(IMPORTS + text))


def test_a_width_without_a_value_that_it_needs(crisp: Crisp) -> None:
    file = plugin(UNIFORM.replace("share: Fraction = Fraction(1, 2)", "share: Fraction"))
    given = ("simulate", "tiny-mixtral-docs", "--policy", "lru", "--budget", "40%", "--limit", 20,
             "--plugin", file, "--width")  # fmt: skip
    done = crisp(*given, "half")
    assert (done.code, done.err) == (
        2, "error: width 'half': share has to be given, as half(share=...)\n"
    )  # fmt: skip
    assert crisp(*given, "half(.5)").code == 0


def test_an_error_of_the_system_in_a_plugin_names_the_plugin(crisp: Crisp) -> None:
    file = plugin(LRU.replace("    best = -1", "    open('/no/such/file')", 1))
    done = crisp("simulate", "tiny-mixtral-docs", "--policy", "lru", "--budget", "40%",
                 "--cache", "copied", "--plugin", file)  # fmt: skip
    assert done.code == 2
    assert re.fullmatch(r"error: --plugin .*mine\.py: line 5: FileNotFoundError: .*\n", done.err)


def test_entry_points_are_loaded_for_unknown_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is a module, or a function that registers."""
    loaded = []

    class Point:
        name, value = "mine", "mine:add"

        def load(self) -> Callable[[], None]:
            loaded.append(self.name)

            def add() -> None:
                load_file(plugin(LRU))

            return add

    monkeypatch.setattr(metadata, "entry_points", lambda group: [Point()])
    assert find_name(CACHES, "lru", "cache") is CACHES["lru"]
    assert not loaded
    assert named("lru", cache="copied").cache.rule.victim is not None
    with pytest.raises(CrispError, match="unknown order 'copied'"):
        find_name(ORDERS, "copied", "order")
    assert loaded == ["mine"]


def test_an_entry_point_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("mine", "no_such_module:add", "crisp.plugins")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    with pytest.raises(CrispError, match=r"^plugin mine \(no_such_module:add\): ModuleNotFound"):
        named("lru", cache="copied")


def test_decorators_work_without_a_file() -> None:
    """As in a notebook or a program of one's own."""

    @register_cache("here")
    def victim(*arrays: Any) -> int:
        return -1

    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    policy = named("lru", cache="here").to_dict()
    assert policy["plugins"] == f"test_plugins.py sha256:{digest}"
    with pytest.raises(CrispError, match="array 'recency', expected last, count, mark, stamp"):
        register_cache("there", last="recency")
    kind = type(named("up").width)
    with pytest.raises(CrispError, match="width there: Uniform has a name already"):
        register_width("there")(kind)


def test_a_plugin_file_is_loaded_once_and_by_its_text() -> None:
    load_file(plugin(LRU))
    load_file(Path("mine.py"))
    (file,) = extensions._files
    assert file == PluginFile(str(Path("mine.py").absolute()), LRU.encode())
    assert isinstance(__import__("sys").modules[file.module], ModuleType)


def test_a_former_name_of_a_policy(crisp: Crisp) -> None:
    done = crisp("simulate", "tiny-mixtral-docs", "--policy", "worth", "--budget", "40%")
    assert done.err.startswith("note: policy worth is called contribution-resident now\n")
    with pytest.warns(FormerNameWarning, match="worth is called contribution-resident now"):
        policy = named("worth")
    assert policy == named("contribution-resident")
    assert policy.to_dict()["name"] == "contribution-resident"
