"""The preflight: right sums are timed, wrong ones and hangs are named with what to do."""

import json
import sys

import fresh_process
import pytest

from kimi_jax.sharding import preflight
from kimi_jax.sharding.preflight import SIZES, Report, Timing


def timing(devices=(0, 1), size=SIZES[-1], seconds=1e-3, right=True) -> Timing:
    return Timing(devices=devices, size=size, seconds=seconds, right=right)


def test_every_pair_and_then_all_devices_are_measured():
    assert preflight.groups(3) == [(0, 1), (0, 2), (1, 2), (0, 1, 2)]
    assert preflight.groups(2) == [(0, 1)]


def test_a_hang_is_ended_named_and_does_not_stop_the_other_groups():
    # Stands for the measuring process: it hangs at the pair (0, 2).
    program = """
import json, sys, time
for devices in json.loads(sys.argv[1]):
    if devices == [0, 2]:
        time.sleep(600)
    print(json.dumps({"devices": devices, "size": 1024, "seconds": 1e-5, "right": True}))
    print(json.dumps("done"), flush=True)
"""
    report = preflight.run(3, hangs_after=1.0, program=[sys.executable, "-c", program])
    assert report.hung == ((0, 2),)
    assert [t.devices for t in report.timings] == [(0, 1), (1, 2), (0, 1, 2)]
    [advice] = report.advice()
    assert "[0, 2]" in advice and "iommu=pt" in advice and "NCCL_P2P_DISABLE=1" in advice
    assert not report.usable


def test_a_wrong_sum_and_a_crawl_are_named():
    report = Report(timings=(timing(right=False), timing((0, 2), seconds=0.1)), hung=())
    wrong, crawl = report.advice()
    assert "[0, 1] are wrong" in wrong
    assert "[0, 2] (0.17 GB/s)" in crawl and "topo -m" in crawl


def test_a_machine_that_is_as_it_should_be_gets_no_advice():
    report = Report(timings=(timing(),), hung=())
    assert report.usable and report.advice() == []


def test_a_result_is_kept_for_the_same_devices_only(tmp_path, monkeypatch):
    monkeypatch.setenv(preflight.FOLDER_VARIABLE, str(tmp_path))
    report = Report(timings=(timing(), timing((0, 1, 2))), hung=((0, 2),))
    preflight.save(report, "some GPU", 3)
    assert preflight.load("some GPU", 3) == report
    assert preflight.load("some GPU", 4) is None
    preflight.path("some GPU", 3).write_text("{")
    assert preflight.load("some GPU", 3) is None


def test_reductions_of_simulated_devices_are_timed_and_right():
    program = """
import dataclasses, json, os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
from kimi_jax.sharding import preflight
timings = preflight.measure((0, 1), sizes=(1 << 10, 1 << 20))
print(json.dumps([dataclasses.asdict(timing) for timing in timings]))
"""
    small, large = json.loads(fresh_process.run(program))
    assert small["right"] and large["right"] and small["seconds"] > 0
    assert (small["size"], large["size"]) == (1 << 10, 1 << 20)


@pytest.mark.parametrize("size", [512 << 10, 1 << 20])
def test_both_sides_of_half_a_mebibyte_are_covered(size):
    assert any(s < size for s in SIZES) and any(s >= size for s in SIZES)
