"""Several processes: one text, printed once; a process that is missing or dies is named."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kimi_jax.sharding import processes
from kimi_jax.sharding.processes import Processes

MAIN = Path(__file__).parents[2] / "main.py"
PROMPT = "Write a Python function that reverses a string."
ENDS_WITHIN = 60  # seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1", 2, None), "process_id is missing"),
        ((None, 2, 0), "coordinator_address is missing"),
        (("host", 2, 0), "coordinator_address='host': expected HOST:PORT"),
        (("host:1", 0, 0), "num_processes=0 must be at least 1"),
        (("host:1", 2, 2), "process_id=2: expected 0..1 of 2 processes"),
    ],
)
def test_incomplete_or_impossible_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        processes.join(*arguments)


def test_no_arguments_or_one_process_is_a_process_alone():
    for arguments in ((None, None, None), ("host:1", 1, 0)):
        alone = processes.join(*arguments)
        assert alone.first and alone.count == 1
        assert alone.decide(lambda: (1, 2)) == (1, 2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_process_0_names_those_that_do_not_come(monkeypatch):
    monkeypatch.setattr(processes, "JOINS_WITHIN", 1.0)
    port = free_port()
    told = []

    def come() -> None:
        connection = processes._reach("127.0.0.1", port, 2, 4)
        with pytest.raises(ValueError) as raised:
            processes._served(connection, "", 2)
        told.append(str(raised.value))

    other = threading.Thread(target=come)
    other.start()
    with pytest.raises(ConnectionError, match="process 1, 3 of 4 has not come") as raised:
        processes.join(f"127.0.0.1:{port}", 4, 0)
    other.join()
    assert told == [str(raised.value)]


def test_the_others_name_a_process_0_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(processes, "JOINS_WITHIN", 0.5)
    with pytest.raises(ConnectionError, match="process 0 does not answer at 127.0.0.1"):
        processes.join(f"127.0.0.1:{free_port()}", 2, 1)


@pytest.mark.parametrize(("rank", "count"), [(1, 3), (0, 2), (2, 2)])
def test_a_process_that_does_not_fit_in_is_refused_on_both_sides(rank, count):
    port = free_port()
    refused = []

    def come() -> None:
        connection = processes._reach("127.0.0.1", port, rank, count)
        with pytest.raises(ValueError, match="does not fit in") as raised:
            processes._served(connection, "", rank)
        refused.append(str(raised.value))

    other = threading.Thread(target=come)
    other.start()
    with pytest.raises(ValueError, match=f"process_id={rank} of num_processes={count}") as raised:
        processes.join(f"127.0.0.1:{port}", 2, 0)
    other.join()
    assert refused == [str(raised.value)]


def test_a_decision_is_process_0s_in_all_of_them():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    first, second = (Processes(rank, 2) for rank in (0, 1))
    for process, other, end in ((first, 1, ends[0]), (second, 0, ends[1])):
        process._connections = {other: processes.Connection(end)}
    second._leaving = first._leaving = True  # closing the sockets ends no process
    listener = threading.Thread(target=second._listen, args=(0, second._connections[0]))
    listener.start()
    made = [first.decide(lambda: {"nodes": (8, 0)}), first.decide(lambda: None)]
    assert [second.decide(lambda: "mine"), second.decide(lambda: "mine")] == made
    assert made == [{"nodes": [8, 0]}, None]
    first._connections[1].socket.shutdown(socket.SHUT_RDWR)
    listener.join()
    for process in (first, second):
        for connection in process._connections.values():
            connection.close()


@dataclasses.dataclass
class Program:
    """main.py, running."""

    process: subprocess.Popen
    out: Path
    err: Path

    def wait(self, seconds: float) -> int:
        return self.process.wait(timeout=seconds)


@contextlib.contextmanager
def running(folder: Path, devices: int, count: int, *flags: str, last: tuple[str, ...] = ()):
    """Starts `count` processes of so many devices each; those that still run are killed.

    last: flags of the last one alone.
    """
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    address = f"127.0.0.1:{free_port()}"
    programs = []
    for rank in range(count):
        own = []
        if count > 1:
            own = [f"--coordinator_address={address}", f"--num_processes={count}"]
            own += [f"--process_id={rank}"]
        own += last if rank == count - 1 else ()
        out, err = folder / f"out{rank}", folder / f"err{rank}"
        with out.open("w") as stdout, err.open("w") as stderr:
            command = [sys.executable, str(MAIN), *own, *flags]
            child = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, env=env
            )
        programs.append(Program(child, out, err))
    try:
        yield programs
    finally:
        for program in programs:
            program.process.kill()
            program.process.wait()


def results(folder: Path, devices: int, count: int, *flags: str) -> list[dict]:
    """What a run writes with --output_json, after checks of who printed what."""
    folder.mkdir()
    path = folder / "results.json"
    with running(folder, devices, count, *flags, f"--output_json={path}") as programs:
        for program in programs:
            assert program.wait(600) == 0, program.err.read_text()
        first, *others = programs
        written = json.loads(path.read_text())
        assert first.out.read_text() == "\n".join(entry["text"] + "\n" for entry in written)
        for other in others:
            assert other.out.read_text() == ""
            assert "tok/s" not in other.err.read_text() and " I" not in other.err.read_text()
    return written


USUAL = (f"--prompt={PROMPT}", "--tree_budget=8")


def pytest_generate_tests(metafunc):
    if "sharding" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        metafunc.parametrize("sharding", ["tp", "ep", "data", "context"] if full else ["tp"])


def test_two_processes_of_four_devices_write_what_one_of_eight_does(tmp_path, sharding):
    flags = (*USUAL, f"--sharding={sharding}", "--max_tokens=40", "--temperature=0")
    [one] = results(tmp_path / "one", 8, 1, *flags)
    [two] = results(tmp_path / "two", 4, 2, *flags)
    assert two["token_ids"] == one["token_ids"] and len(one["token_ids"]) > 10
    assert two["text"] == one["text"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_the_other_which_names_it(tmp_path, victim):
    flags = (*USUAL, "--sharding=tp", "--max_tokens=3000", "--ignore_eos")
    with running(tmp_path, 4, 2, *flags) as programs:
        until = time.monotonic() + 600
        while not programs[0].out.read_text():
            assert time.monotonic() < until and programs[0].process.poll() is None
            time.sleep(0.1)
        programs[victim].process.send_signal(signal.SIGKILL)
        other = programs[1 - victim]
        assert other.wait(ENDS_WITHIN) != 0
        message = other.err.read_text()
        # The library's own service lies in process 0, and may be faster to say so.
        ours = f"process {victim} has ended before the others"
        assert ours in message or (victim == 0 and "leader (usually slice 0 task 0)" in message)


def test_a_process_that_fails_ends_the_other_which_says_why(tmp_path):
    wrong = (f"--model={tmp_path / 'none'}",)
    with running(tmp_path, 1, 2, *USUAL, "--sharding=tp", last=wrong) as programs:
        for program in programs:
            assert program.wait(ENDS_WITHIN) == 1
            assert "process 1 has failed" in program.err.read_text()
