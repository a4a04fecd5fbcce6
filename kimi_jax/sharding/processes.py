"""Several processes, one program: they join, follow process 0's decisions, and end together.

All processes run the same host code over the same requests; `jax.distributed` makes their devices
one mesh. What could come out differently in each (standard input, the clock, Ctrl-C, free memory)
is decided by process 0, which sends the others what it decided. They talk over a TCP connection to
process 0 that also tells who has died: a collective that waits for a dead process would not.
"""

import dataclasses
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax

JOINS_WITHIN = 50.0  # seconds until all processes must have come
BEAT = 5.0  # seconds between two signs of life
SILENT_AFTER = 30.0  # seconds without one


class Processes:
    """A process's view of a run. Alone (the default), every method does the obvious thing."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank = rank
        self.count = count
        self._connections: dict[int, Connection] = {}  # process 0: to all others; others: to 0
        self._decisions: queue.Queue[Any] = queue.Queue()
        self._arrivals: queue.Queue[int] = queue.Queue()
        self._leaving = False

    @property
    def first(self) -> bool:
        """Whether this is process 0, the one that prints."""
        return self.rank == 0

    def decide[T](self, make: Callable[[], T]) -> T:
        """What process 0 makes of it, in every process; as JSON gives it back: lists, no tuples.

        To be called by all processes, in the same order.
        """
        if self.count == 1:
            return make()
        if not self.first:
            return self._decisions.get()
        text = json.dumps(make())
        self._tell({"decision": json.loads(text)})
        return json.loads(text)

    def leave(self) -> None:
        """Waits until all processes have come to their end."""
        if self.count > 1:
            self.meet()
            self._leaving = True
            jax.distributed.shutdown()

    def meet(self) -> None:
        """Waits until all processes have come here.

        To be called before a program runs for the first time: others may still be compiling it,
        and a collective waits half a minute for them, not longer.
        """
        if self.count == 1:
            return
        if self.first:
            for _ in range(self.count - 1):
                self._arrivals.get()
        else:
            self._tell({"here": self.rank})
        self.decide(lambda: None)

    def fail(self, error: Exception) -> NoReturn:
        """Ends all processes after an error of this one, at once and without their threads."""
        if isinstance(error, RuntimeError):
            time.sleep(BEAT)  # it may come of another's death, which is then what is told
        self._end(f"process {self.rank} has failed ({str(error).splitlines()[0]})")

    def _tell(self, message: Any) -> None:
        for connection in self._connections.values():
            connection.send(message)

    def _watch(self) -> None:
        for rank, connection in self._connections.items():
            threading.Thread(target=self._listen, args=(rank, connection), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            self._tell({})
            time.sleep(BEAT)

    def _listen(self, rank: int, connection: "Connection") -> None:
        while True:
            try:
                message = connection.receive()
            except TimeoutError:
                self._end(f"process {rank} has given no sign of life for {SILENT_AFTER:.0f} s")
            except (OSError, ValueError):
                message = None
            if message is None:
                if self._leaving:
                    return
                self._end(f"process {rank} has ended before the others")
            elif "dead" in message:
                self._end(message["dead"])
            elif "decision" in message:
                self._decisions.put(message["decision"])
            elif "here" in message:
                self._arrivals.put(message["here"])

    def _end(self, why: str) -> NoReturn:
        """Ends this process; process 0 tells the others first."""
        line = f"kimi_jax: error: {why}, so process {self.rank} of {self.count} ends\n"
        os.write(2, line.encode())
        self._tell({"dead": why})
        os._exit(1)


ALONE = Processes()


@dataclasses.dataclass(eq=False)
class Connection:
    """Messages in JSON, one a line."""

    socket: socket.socket

    def __post_init__(self) -> None:
        self.socket.settimeout(SILENT_AFTER)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self.socket.makefile("r", encoding="utf-8")
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """A peer that is gone is noticed where messages are received."""
        try:
            with self._lock:
                self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def receive(self) -> dict[str, Any] | None:
        """None: the other side has closed. Raises TimeoutError after a long silence."""
        line = self._lines.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


def join(address: str | None, count: int | None, rank: int | None) -> Processes:
    """Brings the processes of a run together, before JAX has touched a device.

    Args:
      address: HOST:PORT at which process 0 listens; None, with the others: one process alone.
      count: processes in all; rank: this one's number, from 0.

    Raises:
      ValueError: incomplete or impossible arguments, or two processes that contradict each other.
      OSError: an address that cannot be used.
      ConnectionError: processes that have not come in time, by their numbers.
    """
    given = {"coordinator_address": address, "num_processes": count, "process_id": rank}
    if all(value is None for value in given.values()):
        return ALONE
    missing = [name for name, value in given.items() if value is None]
    if address is None or count is None or rank is None:
        raise ValueError(f"several processes need {', '.join(given)}: {missing[0]} is missing")
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f"coordinator_address={address!r}: expected HOST:PORT")
    if count < 1:
        raise ValueError(f"num_processes={count} must be at least 1")
    if not 0 <= rank < count:
        raise ValueError(f"process_id={rank}: expected 0..{count - 1} of {count} processes")
    if count == 1:
        return ALONE
    processes = Processes(rank, count)
    if rank == 0:
        processes._connections = _gather(host, int(port), count)
        inner = f"{host}:{_free_port(host)}"
        processes._tell({"service": inner})
    else:
        connection = _reach(host, int(port), rank, count)
        processes._connections = {0: connection}
        inner = _served(connection, address, rank)
    processes._watch()
    # It would catch SIGTERM, and the process would live on.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(inner, count, rank, cluster_detection_method="deactivate")
    return processes


def _gather(host: str, port: int, count: int) -> dict[int, Connection]:
    """Process 0 waits for all others."""
    connections: dict[int, Connection] = {}
    until = time.monotonic() + JOINS_WITHIN
    with socket.create_server((host, port)) as server:
        while len(connections) < count - 1:
            server.settimeout(max(until - time.monotonic(), 0.01))
            try:
                connection = Connection(server.accept()[0])
            except TimeoutError:
                absent = [str(rank) for rank in range(1, count) if rank not in connections]
                why = (
                    f"process {', '.join(absent)} of {count} has not come to {host}:{port} within "
                    f"{JOINS_WITHIN:.0f} s: start it with --process_id={absent[0]}"
                )
                raise ConnectionError(_refuse(connections.values(), why)) from None
            try:
                hello = connection.receive()
                rank, others = int(hello["rank"]), int(hello["count"])  # type: ignore[index]
            except (OSError, ValueError, TypeError, KeyError):
                connection.close()  # not one of ours
                continue
            if others != count or not 0 < rank < count or rank in connections:
                why = (
                    f"process_id={rank} of num_processes={others} does not fit in: process 0 "
                    f"expects {count} processes, each number once"
                )
                raise ValueError(_refuse([connection, *connections.values()], why))
            connections[rank] = connection
    return connections


def _refuse(connections: Iterable[Connection], why: str) -> str:
    for connection in connections:
        connection.send({"refused": why})
        connection.close()
    return why


def _reach(host: str, port: int, rank: int, count: int) -> Connection:
    """The others look for process 0 until it is there."""
    until = time.monotonic() + JOINS_WITHIN
    while True:
        try:
            connection = Connection(socket.create_connection((host, port), timeout=BEAT))
            break
        except OSError as error:
            if time.monotonic() > until:
                raise ConnectionError(
                    f"process 0 does not answer at {host}:{port} within {JOINS_WITHIN:.0f} s "
                    f"({error}): is it running with this --coordinator_address?"
                ) from error
            time.sleep(0.2)
    connection.send({"rank": rank, "count": count})
    return connection


def _served(connection: Connection, address: str, rank: int) -> str:
    """The address of JAX's own service, which process 0 sends when all are there."""
    connection.socket.settimeout(JOINS_WITHIN + BEAT)
    try:
        answer = connection.receive()
    except OSError:
        answer = None
    if answer and "service" in answer:
        connection.socket.settimeout(SILENT_AFTER)
        return answer["service"]
    connection.close()
    if answer and "refused" in answer:
        raise ValueError(answer["refused"])
    raise ConnectionError(
        f"process 0 at {address} has ended while process {rank} waited for the others"
    )


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
