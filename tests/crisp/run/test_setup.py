"""From files to a case, for whoever runs it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.errors import CrispError, FormerNameWarning
from crisp.model.spec import ModelSpec
from crisp.policy import Budget
from crisp.profile import Profile
from crisp.run.case import Conditions
from crisp.run.inputs import LoadedInputs, TraceSource, cached_inputs, load_inputs
from crisp.run.setup import Setup, load_setup
from tests.crisp.cli.toy import CONFIG, toy_trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.trace.safetensors"
    toy_trace().save(path)
    return path


def test_the_first_half_is_counted_and_the_rest_is_run(file: Path) -> None:
    inputs = load_inputs(TraceSource.resolve(file))
    whole = toy_trace()
    assert inputs.counted is not None
    assert np.array_equal(inputs.counted.experts, whole.experts[:20])
    assert np.array_equal(inputs.trace.experts, whole.experts[20:])
    assert inputs.profile.digest() == Profile.from_trace(inputs.counted).digest()
    assert inputs.split == "profile: the first 2 of the trace's 4 sequences; run: the rest"
    assert inputs.file == {"name": "toy.trace.safetensors", "sha256": whole.digest()}
    again = LoadedInputs.from_trace(whole)
    assert (again.split, again.trace.digest()) == (inputs.split, inputs.trace.digest())


def test_with_a_trace_to_count_all_is_run(file: Path) -> None:
    inputs = load_inputs(TraceSource.resolve(file, profile=file, layers=2))
    assert (inputs.trace.rows, inputs.trace.layers) == (40, 2)
    assert inputs.split == "profile: all 40 rows of toy.trace.safetensors; simulated: all rows"


def test_a_source_goes_to_other_processes_and_is_loaded_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    source = TraceSource.resolve(file.name)
    assert source.trace == file.absolute()
    again = pickle.loads(pickle.dumps(source))
    assert again == source
    assert cached_inputs(again) is cached_inputs(source)
    cached_inputs.cache_clear()


def test_policies_budgets_and_conditions_as_they_are_spelled(file: Path) -> None:
    setup = load_setup(file, bits=8, conditions=Conditions(seed=3))
    assert (setup.name, setup.spec.bits) == ("toy.trace.safetensors", 8)
    case = setup.case("mo", "50%", limit=5, granularity="block")
    assert case.policy == setup.policy("mo")
    assert (case.budget, case.conditions) == (
        Budget.parse("50%"),
        Conditions(granularity="block", seed=3, limit=5),
    )
    assert case.settings("simpy", None)["trace"]["file"] == setup.inputs.file
    assert setup.conditions.limit is None
    cached = setup.policy("lru", cache="random")
    assert setup.case(cached, Budget.parse("50%")).policy.to_dict()["cache"] == "random(3)"
    with pytest.raises(CrispError, match="unknown policy 'lruu'; did you mean 'lru'"):
        setup.case("lruu", "50%")
    with pytest.raises(TypeError, match="limits"):
        setup.case("lru", "50%", limits=5)


def test_a_geometry_is_as_good_as_its_name(file: Path) -> None:
    spec = ModelSpec.from_config(CONFIG, "toy")
    for bits in (4.25, "4.25", Fraction(17, 4)):
        assert load_setup(file, model=spec, bits=bits).spec == spec.with_(bits=Fraction(17, 4))


def test_both_profile_and_metadata_are_refused(file: Path) -> None:
    with pytest.raises(CrispError, match="both give counts of combinations"):
        load_setup(file, profile=file, metadata=file)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trace": None}, "trace None: expected a name or a path"),
        ({"trace": 3}, "trace 3: expected a name or a path"),
        ({"trace": b"x"}, "trace b'x': expected a name or a path"),
        ({"trace": ""}, "trace '': expected a name or a path"),
        ({"trace": "x" * 5000}, f"trace {'x' * 40}…: File name too long"),
        ({"trace": "x" * 250}, f"unknown trace '{'x' * 40}…'; known: "),
        ({"trace": "x\ny"}, "unknown trace 'x y'"),
        ({"trace": "x\0y"}, "trace 'x\\x00y': expected a name or a path"),
        ({"profile": 3}, "profile 3: expected a name or a path"),
        ({"metadata": 3}, "metadata 3: expected a name or a path"),
        ({"metadata": "/nowhere"}, "/nowhere: cannot be read: No such"),
        ({"model": 3}, "model 3: expected a name or a path"),
        ({"model": ""}, "model '': expected a name or a path"),
        ({"model": Path("store")}, "unknown model 'store'; "),
        (
            {"hardware": "rtx4090-pcie4"},
            "hardware 'rtx4090-pcie4': expected a HardwareProfile, as "
            "crisp.sim.hardware_profile(name) returns",
        ),
        ({"conditions": {}}, "conditions {}: expected a Conditions"),
        ({"bits": True}, "bits True: expected a number"),
        ({"bits": []}, "bits []: expected a number"),
        ({"block": 1.5}, "block 1.5: expected a whole number"),
        ({"block": "16"}, "block '16': expected a whole number"),
        ({"layers": "2"}, "layers '2': expected a whole number"),
        ({"top_k": "x"}, "top_k 'x': expected a whole number"),
        ({"top_k": True}, "top_k True: expected a whole number"),
    ],
)
def test_a_setup_of_other_types_is_refused(file: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(CrispError) as refused:
        load_setup(**{"trace": file, **given})
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda s: s.case("lru", 20), "budget 20: expected a text such as '10%', '0.1' or '4GB'"),
        (lambda s: s.case("lru", 0.2), "budget 0.2: expected a text"),
        (lambda s: s.case("lru", None), "budget None: expected a text"),
        (lambda s: s.case(None, "50%"), "policy None: expected the name of a policy, or a Policy"),
        (lambda s: s.case(3, "50%"), "policy 3: expected the name of a policy, or a Policy"),
        (lambda s: s.policy(3), "policy 3: expected the name of a policy"),
        (lambda s: s.policy("lru", cache=3), "cache 3: expected a name, as --cache takes it"),
        (lambda s: s.policies("lru"), "policies 'lru': expected a list of names"),
        (lambda s: s.policies(None), "policies None: expected a list of names"),
        (lambda s: s.case("lru", "50%", limit=1.5), "limit 1.5: expected a whole number"),
        (lambda s: s.case("lru", "50%", batch=None), "batch None: expected a whole number"),
        (lambda s: s.case("lru", "50%", seed="1"), "seed '1': expected a whole number"),
        (lambda s: s.case("lru", "50%", phase=3), "unknown phase '3'; known: "),
    ],
)
def test_a_case_of_other_types_is_refused(
    file: Path, use: Callable[[Setup], object], message: str
) -> None:
    with pytest.raises(CrispError) as refused:
        use(load_setup(file))
    assert str(refused.value).startswith(message)


def test_names_and_paths_are_taken_alike(file: Path) -> None:
    assert load_setup(str(file)).spec == load_setup(file).spec
    model = file.parent / "config.json"
    model.write_text(json.dumps(CONFIG), encoding="utf-8")
    assert load_setup(file, model=model).spec == load_setup(file, model=str(model)).spec
    source = TraceSource.resolve(file, metadata="counts")
    assert source == TraceSource.resolve(file, metadata=Path("counts"))


def test_a_former_name_of_a_policy_warns(file: Path) -> None:
    with pytest.warns(FormerNameWarning, match="policy worth is called contribution-resident now"):
        assert load_setup(file).policy("worth").name == "contribution-resident"
