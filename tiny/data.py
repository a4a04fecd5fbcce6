"""Windows of tokens, drawn on the device.

The whole stream lies in device memory as uint16. A row of a batch picks a source by the mixture's
weights, then a start: anywhere in the source for text, the start of a random dialogue for chat.
"""

import json
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from paths import TOKENS
from tokens import unpack

# Shares of sampled tokens. 'chat' are functions, 'method' are methods.
MIXTURE = {
    "stdlib": 0.06,
    "pydocs": 0.055,
    "sqlite": 0.015,
    "pypi": 0.71,
    "chat": 0.12,
    "method": 0.04,
}
ALIGNED = ("chat", "method", "short", "primer")  # rows begin at the start of a dialogue


@dataclass(frozen=True)
class Stream:
    tokens: jax.Array  # uint16 [N]
    cumulative: jax.Array  # float32 [sources], of the mixture
    ranges: jax.Array  # int32 [sources, 2]
    aligned: jax.Array  # bool [sources]
    starts: jax.Array  # int32 [all starts], source after source
    starts_range: jax.Array  # int32 [sources, 2] into `starts`
    names: tuple[str, ...]


jax.tree_util.register_dataclass(
    Stream,
    data_fields=["tokens", "cumulative", "ranges", "aligned", "starts", "starts_range"],
    meta_fields=["names"],
)


def load(split: str, mixture: dict[str, float] = MIXTURE, folder=TOKENS, tokens=None) -> Stream:
    """`tokens`: of another mixture of the same split, to read and hold them once."""
    index = json.loads((folder / f"{split}.json").read_text())
    starts = np.load(folder / f"{split}_starts.npz")
    names = tuple(mixture)
    offsets = np.cumsum([0, *(len(starts[n]) for n in names)])
    share = np.array([mixture[n] for n in names])
    return Stream(
        tokens=jnp.asarray(unpack(folder / f"{split}.xz")) if tokens is None else tokens,
        cumulative=jnp.asarray(np.cumsum(share / share.sum()), jnp.float32),
        ranges=jnp.asarray([index["ranges"][n] for n in names], jnp.int32),
        aligned=jnp.asarray([n in ALIGNED for n in names]),
        starts=jnp.asarray(np.concatenate([starts[n] for n in names])),
        starts_range=jnp.asarray(np.stack([offsets[:-1], offsets[1:]], 1), jnp.int32),
        names=names,
    )


def window_starts(stream: Stream, key, batch: int, length: int, starts_share: float = 0.0):
    """Starts int32 [batch]. `starts_share` of the text rows begin at the start of a document."""
    k_source, k_offset, k_start, k_kind = jax.random.split(key, 4)
    pick = jax.random.uniform(k_source, (batch,))
    source = jnp.minimum((pick[:, None] >= stream.cumulative).sum(1), len(stream.names) - 1)
    low, high = stream.ranges[source].T
    anywhere = low + (jax.random.uniform(k_offset, (batch,)) * (high - low)).astype(jnp.int32)
    first, last = stream.starts_range[source].T
    nth = first + (jax.random.uniform(k_start, (batch,)) * (last - first)).astype(jnp.int32)
    begin = stream.starts[jnp.minimum(nth, last - 1)]
    at_start = stream.aligned[source] | (jax.random.uniform(k_kind, (batch,)) < starts_share)
    begin = jnp.where(at_start, begin, anywhere)
    return jnp.clip(begin, 0, stream.tokens.shape[0] - length)


def windows(stream: Stream, starts, length: int):
    """Tokens int32 [batch, length]."""
    return stream.tokens[starts[:, None] + jnp.arange(length)].astype(jnp.int32)
