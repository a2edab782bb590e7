"""From files to a case, for whoever runs it."""

from __future__ import annotations

import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget
from crisp.profile import Profile
from crisp.run.case import Conditions
from crisp.run.inputs import LoadedInputs, TraceSource, cached_inputs, load_inputs
from crisp.run.setup import load_setup
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
