"""What every checkpoint that can be loaded has in common, whatever its files look like."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from absl import logging
from tqdm import tqdm

from kimi_jax.checkpoint.place import Placing, Seconds


@dataclass(frozen=True, kw_only=True)
class Checkpoint(abc.ABC):
    """An opened folder: everything that can be told without reading weights has been checked."""

    folder: Path
    config: Any  # ModelConfig or DrafterConfig
    describe: Callable[[Any, Any], Any]  # (config, dtype) -> tree of Param

    @property
    @abc.abstractmethod
    def tensors_used(self) -> int:
        """Tensors of the published checkpoint that the weights are made of."""

    @property
    @abc.abstractmethod
    def bytes_used(self) -> int:
        """Bytes of the weights as stored."""

    @abc.abstractmethod
    def peak_host_bytes(self, dtype: Any, shardings: Any = None) -> int:
        """An upper bound of what `load` holds on the host beyond the arrays it has completed."""

    @abc.abstractmethod
    def _read(self, placing: Placing, advance: Callable[[int], Any]) -> None:
        """Hands every parameter to `placing`; calls `advance` with bytes as they are read."""

    def _bytes_to_read(self, placing: Placing) -> int:
        """Bytes that this process reads."""
        del placing
        return self.bytes_used

    def load(
        self,
        *,
        dtype: Any,
        shardings: Any = None,
        progress: bool = True,
        seconds: Seconds | None = None,
        planned: int | None = None,
    ) -> Any:
        """Reads the weights straight into their places on the devices.

        Each process reads what its own devices hold. The bytes that arrive on each device are
        compared with those that the shardings call for.

        Args:
            dtype: bfloat16 or float32, of everything but codes, scales and the router's bias.
            shardings: None for the default device, or a tree of `jax.sharding.Sharding` like the
                weights'.
            progress: whether to show a progress bar, in bytes, on stderr.
            seconds: filled with where the time went, if given; the log states it in any case.
            planned: bytes that a memory plan has for these weights on each device, if there is one;
                they are compared with what arrived.

        Returns:
            the tree of arrays that `describe(config, dtype)` describes.

        Raises:
            CheckpointError: a tensor holds NaN or infinity, a file changed under the reader, or a
                device holds another number of bytes than planned.
        """
        if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
            raise ValueError(f"dtype={dtype!r} is not supported; use bfloat16 or float32")
        spent = seconds or Seconds()
        placing = Placing(self.describe(self.config, dtype), shardings, spent)
        total = self._bytes_to_read(placing)
        logging.info(
            "%s: reading %.2f GiB of weights, with at most %.2f GiB of host memory in flight",
            *(self.folder, total / 2**30, self.peak_host_bytes(dtype, shardings) / 2**30),
        )
        start = time.monotonic()
        with tqdm(
            total=total,
            desc=f"reading {self.folder.name}",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not progress,
        ) as bar:
            self._read(placing, bar.update)
        tree = placing.finish(self.folder, planned)
        spent.total = time.monotonic() - start
        logging.info("%s: %s; %s", self.folder, self._account(), spent.line(total))
        devices = placing.bytes_per_device
        if len(devices) > 1:
            low, high = min(devices.values()), max(devices.values())
            logging.info(
                "%s: %.2f to %.2f GiB on each of %d devices, as planned",
                *(self.folder, low / 2**30, high / 2**30, len(devices)),
            )
        return tree

    def _account(self) -> str:
        """What was read, for the log."""
        return f"{self.tensors_used} tensors"
