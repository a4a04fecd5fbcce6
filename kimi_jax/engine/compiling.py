"""Compiling ahead: the persistent cache, and a count of the programs that XLA builds."""

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import jax

CACHE_VARIABLE = "KIMI_JAX_COMPILATION_CACHE"
"""Environment variable: folder of the persistent compilation cache; empty turns it off."""


def default_cache_folder() -> Path | None:
    """Where compiled programs are kept between processes: a folder of this user's own, or None.

    KIMI_JAX_COMPILATION_CACHE names it; otherwise kimi_jax/xla under $XDG_CACHE_HOME (~/.cache).
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kimi_jax" / "xla"


def enable_persistent_cache(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Turns JAX's persistent compilation cache on, for programs of any size.

    A folder that the caller has already given to JAX (JAX_COMPILATION_CACHE_DIR) is left alone.
    Cached programs run as they are: the folder must be writable by this user only (it is created
    so). Returns the folder in use, or None if there is none.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    chosen = Path(folder) if folder is not None else default_cache_folder()
    if chosen is None:
        return None
    try:
        chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None  # a read-only home: compile every time, as without a cache
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    # Without these two, programs that compile in under a second are not kept.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return chosen


@dataclasses.dataclass
class CompileCounter:
    """Programs built since the process started, read from the persistent cache or compiled.

    JAX reports each through its monitoring events, so that one built by accident (an operation
    outside the compiled step, a shape that warm-up did not cover) is counted too.
    """

    built: int = 0
    from_cache: int = 0
    seconds: float = 0.0
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    @property
    def compiled(self) -> int:
        """Programs that XLA compiled: those that the cache did not hold."""
        return self.built - self.from_cache

    def on_duration(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            with self._lock:
                self.built += 1
                self.seconds += duration_secs

    def on_event(self, event: str, **kwargs: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            with self._lock:
                self.from_cache += 1


_counter: CompileCounter | None = None


def compile_counter() -> CompileCounter:
    """The process's counter; it counts from the first call on."""
    global _counter
    if _counter is None:
        _counter = CompileCounter()
        jax.monitoring.register_event_duration_secs_listener(_counter.on_duration)
        jax.monitoring.register_event_listener(_counter.on_event)
    return _counter
