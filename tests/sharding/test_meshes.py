"""Every mesh gives what one device gives, by the collectives that the design counts.

The meshes run in one process of eight simulated devices (`on_eight_devices.py`): a choice of them,
all of them with --full. A text may differ where the draw was a near tie; no logits may.
"""

import json
from pathlib import Path

import fresh_process
import pytest

PROGRAM = (Path(__file__).parent / "on_eight_devices.py").read_text(encoding="utf-8")
USUAL = {
    "tp8": {"tensor"},
    "ep8": {"expert"},
    "mixed8": {"expert", "tensor"},
    "data4": set(),
    "context4": {"tensor"},
    "travel8": {"expert"},  # experts over data, too
}
OTHERS = {
    "tp1": set(),
    "tp2": {"tensor"},
    "tp4": {"tensor"},
    "ep2": {"expert"},
    "ep4": {"expert"},
    "mixed4": {"expert", "tensor"},
    "mixed8t": {"expert", "tensor"},
    "data2": set(),
    "data8": set(),
    "context2": {"tensor"},
    "context8": {"expert", "tensor"},
    "all8": {"expert", "tensor"},
    "travel4": set(),
}
MODEL_AXES = USUAL | OTHERS
"""Mesh -> the axes of the devices that share a copy of the model."""

NEAR_TIE = 1e-4
STAGES = ("propose", "forward")
STEPS, SEQUENCES, NODES = 64, 5, 33  # of the program, as are the sizes below
LAYERS, MOE_LAYERS, DRAFTER_LAYERS, DRAFTED = 3, 2, 1, 8
HIDDEN, HEADS, ROW, EXPERTS_A_ROW, TOP = 256, 16, 96, 2, 4


def pytest_generate_tests(metafunc):
    if "mesh" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        metafunc.parametrize("mesh", [*USUAL, *(OTHERS if full else ())])


@pytest.fixture(scope="module")
def results(full) -> dict:
    return json.loads(fresh_process.run(PROGRAM, *USUAL, *(OTHERS if full else ())))


def test_one_device_draws_what_a_teacher_forced_pass_finds_best(results):
    one = results["one"]
    assert all(count >= STEPS for count in one["tokens"])
    for drawn, margins in zip(one["drawn"], one["margins"], strict=True):
        assert all(same or margin < NEAR_TIE for same, margin in zip(drawn, margins, strict=False))


def test_a_mesh_generates_what_one_device_generates(results, mesh):
    for sequence, token, margin in results[mesh]["differences"]:
        assert margin < NEAR_TIE, f"sequence {sequence}, token {token}: margin {margin:.1e}"
    assert results[mesh]["logprobs"] < 1e-4


def test_logits_of_plain_rows_and_trees_are_one_devices(results, mesh):
    assert results[mesh]["verify"] <= 1e-5


@pytest.mark.parametrize("experts", ["all", "routed", "shared"])
def test_logits_of_a_prompt_are_one_devices_with_all_routed_or_shared_experts(
    results, mesh, experts
):
    assert results[mesh]["scores"][experts] <= 1e-5
    if experts != "all":
        assert results["one"]["apart"][experts] > 0.1, "leaving experts out must change something"


def test_all_devices_decide_the_same_bit_for_bit(results, mesh):
    assert results[mesh]["agree"]


@pytest.mark.parametrize("mesh_of_eight", ["tp8", "ep8", "mixed8"])
def test_a_maximum_in_any_shard_of_the_vocabulary_is_found_the_lowest_id_among_equals(
    results, mesh_of_eight
):
    found = results["vocabulary"][mesh_of_eight]
    assert found.pop("lowest")
    assert all(found.values()), found


def groups_along_data(mesh: str) -> int:
    return {"data2": 2, "data4": 4, "data8": 8, "all8": 2, "travel4": 4, "travel8": 4}.get(mesh, 1)


def of(results: dict, mesh: str, stage: str) -> list[tuple]:
    """(kind, elements, axes) of the collectives of a stage of the compiled step, or of the rest.

    The compiler joins sums that are ready together, of one stage and the next behind the forward.
    """
    return sorted(
        (kind, size, tuple(axes))
        for kind, where, size, axes in results[mesh]["collectives"]
        if stage == next((name for name in STAGES if f"/{name}/" in where), "rest")
    )


def rows(mesh: str) -> int:
    """Rows of a device's step."""
    return -(-SEQUENCES // groups_along_data(mesh)) * (NODES + 1)


def test_the_target_has_two_reductions_a_layer_and_gathers_no_weights_and_no_cache(results, mesh):
    axes = tuple(sorted(MODEL_AXES[mesh]))
    devices = int(mesh.rstrip("t")[-1]) // groups_along_data(mesh)
    count = rows(mesh)
    expected = []
    if axes:
        expected += [("all-reduce", count * HIDDEN, axes)] * (1 + 2 * LAYERS)
    if mesh.startswith("context"):  # queries, the parts' log-sum-exps, and what the parts attend to
        latent = ROW - 32
        expected += [("all-gather", count * HEADS * ROW, axes)] * LAYERS
        expected += [("all-reduce", count * HEADS, axes)] * LAYERS
        expected += [("reduce-scatter", count * HEADS * (latent + 1) // devices, axes)] * LAYERS
    if mesh.startswith("travel"):  # rows, their experts and shares; the experts' sums
        every = count * groups_along_data(mesh)
        expected += [("all-gather", every * HIDDEN, ("data",))] * MOE_LAYERS
        expected += [("all-gather", every * EXPERTS_A_ROW, ("data",))] * (2 * MOE_LAYERS)
        expected += [("reduce-scatter", count * HIDDEN, ("data",))] * MOE_LAYERS
    assert of(results, mesh, "forward") == sorted(expected)


def test_a_draft_has_two_reductions_a_layer_and_gathers_candidates_only(results, mesh):
    axes = tuple(sorted(MODEL_AXES[mesh]))
    batch = -(-SEQUENCES // groups_along_data(mesh))
    devices = int(mesh.rstrip("t")[-1]) // groups_along_data(mesh)
    expected = []
    if axes:
        drafted = batch * DRAFTED * HIDDEN
        expected += [("all-reduce", drafted, axes)] * (1 + 2 * DRAFTER_LAYERS)
        expected += [("all-reduce", batch * (DRAFTED - 1), axes)] * 2  # of the log-softmax
        expected += [("all-gather", batch * (DRAFTED - 1) * NODES * devices, axes)] * 2
    assert of(results, mesh, "propose") == sorted(expected)


def test_draws_and_commits_move_no_logits(results, mesh):
    axes = tuple(sorted(MODEL_AXES[mesh]))
    batch = -(-SEQUENCES // groups_along_data(mesh))
    devices = int(mesh.rstrip("t")[-1]) // groups_along_data(mesh)
    found = of(results, mesh, "rest")
    assert all(one[2] == axes for one in found)
    gathered = [size for kind, size, _ in found if kind == "all-gather"]
    assert gathered == ([batch * DRAFTED * TOP * devices] * 2 if axes else [])
    # The features of the drafter's context are one sum; all others are of a number a row.
    reduced = [size for kind, size, _ in found if kind == "all-reduce"]
    features = batch * DRAFTED * HIDDEN
    assert sum(size >= features for size in reduced) == bool(axes)
    assert sum(reduced) <= bool(axes) * (features + 8 * rows(mesh) + 4 * batch * DRAFTED)
    assert {kind for kind, _, _ in found} <= {"all-gather", "all-reduce"}
