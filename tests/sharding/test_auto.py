"""What `auto` takes, by the links that were measured and the memory there is."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kimi_jax import llm
from kimi_jax.config import DRAFTER_PRESETS, PRESETS
from kimi_jax.engine.plan import Memory
from kimi_jax.model import weights as target_weights
from kimi_jax.sharding import auto, preflight, traffic
from kimi_jax.sharding.mesh import Shape
from kimi_jax.sharding.preflight import Report, Timing
from kimi_jax.sharding.processes import ALONE

K26, DRAFTER = PRESETS["kimi-k2.6"], DRAFTER_PRESETS["kimi-k2.6"]
FAST, SLOW = auto.assumed(10e-6, 400e9), auto.assumed(115e-6, 8e9)
H200 = Memory(device="NVIDIA H200", platform="gpu", total=141 << 30, usable=126 << 30)


def choose(links, *, sequences=16, nodes=8, usable=H200.usable, config=K26, drafter=DRAFTER):
    return auto.choose(
        config,
        drafter,
        links,
        devices=8,
        kind="NVIDIA H200",
        usable=usable,
        sequences=sequences,
        nodes=nodes,
    )


def test_the_readme_has_the_computed_table():
    readme = Path(__file__).parents[2] / "README.md"
    assert auto.table() in readme.read_text(encoding="utf-8")


def test_fast_links_split_everything_and_slow_ones_the_experts():
    assert choose(FAST) == ("tp", Shape(tensor=8))
    _, shape = choose(SLOW)
    assert shape == Shape(data=8, experts_over_data=True)


def test_one_sequence_is_worth_all_devices():
    assert choose(FAST, sequences=1) == choose(SLOW, sequences=1) == ("tp", Shape(tensor=8))


def test_a_preset_whose_weights_do_not_fit_is_not_taken():
    assert choose(SLOW, usable=90 * 10**9)[1] != choose(SLOW)[1]
    with pytest.raises(ValueError, match="no preset .* tp: 77.1 GB of weights for 10.0 GB"):
        choose(FAST, usable=10**10)


def test_a_preset_that_does_not_divide_the_model_is_not_taken():
    odd = dataclasses.replace(K26, n_routed_experts=385)
    assert choose(SLOW, config=odd) == ("tp", Shape(tensor=8))


def test_a_model_without_a_drafter_is_placed_too():
    assert choose(FAST, nodes=0, drafter=None) == ("tp", Shape(tensor=8))


def test_the_chosen_preset_is_the_fastest_by_its_own_count():
    def time(shape):
        step = traffic.step(K26, DRAFTER, shape, sequences=16, nodes=8, context=auto.CONTEXT)
        return auto.seconds(step, SLOW, auto.read_rate("NVIDIA H200"))

    name, shape = choose(SLOW)
    assert time(shape) == min(time(other) for other in auto.presets(8).values())
    assert auto.presets(8)[name] == shape


def test_sums_between_the_measured_sizes_are_interpolated():
    links = Report(
        timings=(
            Timing(devices=(0, 1), size=1000, seconds=9.0, right=True),  # a pair: not all devices
            Timing(devices=(0, 1, 2), size=1000, seconds=1.0, right=True),
            Timing(devices=(0, 1, 2), size=3000, seconds=2.0, right=True),
        ),
        hung=(),
    )
    assert [links.seconds(size) for size in (10, 1000, 2000, 6000)] == [1.0, 1.0, 1.5, 4.0]


@pytest.fixture
def eight_gpus(monkeypatch) -> list:
    """Makes `set_up`'s parts believe in eight GPUs; holds the preflights that they ask for."""
    asked = []
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr(preflight, "ensure", lambda *of: asked.append(of) or FAST)
    return asked


def automatic(config, memory=H200):
    return llm._automatic(config, None, memory, ALONE, sequences=1, nodes=0)


def test_auto_puts_a_model_that_one_gpu_cannot_hold_on_all_by_their_links(eight_gpus):
    assert automatic(K26) == Shape(tensor=8)
    assert eight_gpus == [("NVIDIA H200", 8)]


def test_auto_leaves_a_model_that_fits_on_one_device_and_measures_nothing(eight_gpus):
    assert automatic(PRESETS["tiny-k2"]) == Shape()
    # Simulated devices share one memory: more of them hold no more.
    assert automatic(K26, dataclasses.replace(H200, platform="cpu")) == Shape()
    assert eight_gpus == []


def test_the_links_are_measured_before_gpus_work_together(eight_gpus):
    llm._check_links(Shape(tensor=2), H200, ALONE)
    assert eight_gpus == [("NVIDIA H200", 8)]
    llm._check_links(Shape(), H200, ALONE)
    assert len(eight_gpus) == 1


def test_a_preflight_is_kept_and_asked_once(tmp_path, monkeypatch):
    monkeypatch.setenv(preflight.FOLDER_VARIABLE, str(tmp_path))
    runs = []
    monkeypatch.setattr(preflight, "run", lambda count: runs.append(count) or FAST)
    assert preflight.ensure("GPU", 8) == preflight.ensure("GPU", 8) == FAST
    assert runs == [8]


def test_links_that_hang_are_refused_with_advice_and_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv(preflight.FOLDER_VARIABLE, str(tmp_path))
    hung = dataclasses.replace(FAST, hung=((0, 3),))
    monkeypatch.setattr(preflight, "run", lambda count: hung)
    with pytest.raises(ValueError, match=r"hangs between devices \[0, 3\].*iommu=pt"):
        preflight.ensure("GPU", 8)
    monkeypatch.setattr(preflight, "run", lambda count: FAST)
    assert preflight.ensure("GPU", 8) == FAST


def test_weights_of_k26_fit_no_single_device():
    described = target_weights.abstract(K26, jnp.bfloat16)
    assert target_weights.num_bytes(described) > 4 * H200.usable
