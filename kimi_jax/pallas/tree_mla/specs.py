"""Shapes and cases that tests and benchmarks share, and the exact answer to a case."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Parents = Callable[[np.random.Generator, int], list[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """heads a device, latent rank R, rotary dimension PE, tokens a page."""

    heads: int
    rank: int = 512
    rope: int = 64
    page_size: int = 64


K26_TP8 = Spec(heads=8)  # Kimi K2.6, heads over eight devices
K26 = Spec(heads=64)
TINY = Spec(heads=4, rank=64, rope=32, page_size=16)  # the bundled model
AWKWARD = (
    Spec(heads=1, rank=64, rope=32, page_size=128),
    Spec(heads=5, rank=128, rope=64, page_size=32),
    Spec(heads=48, page_size=16),
)

ROWS = (1, 9, 17, 33)
CELLS = (  # spec, batch, context: what the benchmark times for each of ROWS
    (K26_TP8, 1, 4096),
    (K26_TP8, 1, 32768),
    (K26_TP8, 8, 4096),
    (K26_TP8, 8, 32768),
    (K26_TP8, 64, 4096),
    (K26, 1, 4096),
    (K26, 1, 32768),
)


def random_tree(rng: np.random.Generator, rows: int) -> list[int]:
    """Parent of each row, an earlier one; the root's is -1."""
    return [-1, *(int(rng.integers(0, row)) for row in range(1, rows))]


def chain(_: np.random.Generator, rows: int) -> list[int]:
    return list(range(-1, rows - 1))


def star(_: np.random.Generator, rows: int) -> list[int]:
    return [-1, *[0] * (rows - 1)]


def ancestors(parents: Sequence[int], words: int) -> np.ndarray:
    """uint32 [rows, words]: bit j of row r: j is r or an ancestor of r."""
    seen = np.zeros((len(parents), words), np.uint32)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] = seen[parent]
        seen[row, row // 32] |= np.uint32(1 << (row % 32))
    return seen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Operands of `api.attend` as NumPy arrays, in its order, and its sizes.

    Floats are float32 that bfloat16 holds exactly.
    """

    q: np.ndarray
    latent: np.ndarray
    layer: int
    own: np.ndarray
    ancestors: np.ndarray
    row_start: np.ndarray
    row_count: np.ndarray
    length: np.ndarray
    page_table: np.ndarray
    spec: Spec
    max_rows: int
    scale: float

    def operands(self, dtype: jnp.dtype = jnp.bfloat16) -> tuple[jax.Array, ...]:
        """What `api.attend` takes by position, floats in `dtype`."""
        arrays = [getattr(self, field.name) for field in dataclasses.fields(self)][:9]
        return tuple(
            jnp.asarray(a, dtype if np.asarray(a).dtype == np.float32 else None) for a in arrays
        )


def make(
    spec: Spec,
    rows: Sequence[int],
    lengths: Sequence[int],
    *,
    seed: int,
    max_rows: int | None = None,
    parents: Parents = random_tree,
    gap: int = 0,
    layers: int = 2,
    hollow: bool = True,
    dead: Sequence[int] | None = None,
) -> Case:
    """A random case: sequence b has rows[b] rows and lengths[b] cached positions.

    gap: flat rows between two sequences that belong to neither. hollow: whatever belongs to nobody
    holds NaN: pages behind a context, other layers, rows in the gaps. dead: how many of a
    sequence's last rows see no row and are seen by none, as unused nodes of a tree.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        values = rng.standard_normal(shape, np.float32)
        return values.astype(jnp.bfloat16).astype(np.float32)

    batch, max_rows = len(rows), max_rows or max(max(rows), 1)
    width, words = spec.rank + spec.rope, -(-max_rows // 32)
    nothing = np.nan if hollow else 0.0
    starts = np.cumsum([0, *(count + gap for count in rows)])[:-1]
    num_rows = int(sum(rows)) + gap * batch

    pages = max(-(-max(lengths) // spec.page_size), 1)
    num_pages = 1 + sum(-(-length // spec.page_size) for length in lengths)
    latent = np.full((layers, num_pages, spec.page_size, width), nothing, np.float32)
    layer = layers - 1
    page_table = np.zeros((batch, pages), np.int32)
    free = 1 + rng.permutation(num_pages - 1)
    for b, length in enumerate(lengths):
        mine, free = np.split(free, [-(-length // spec.page_size)])
        page_table[b, : len(mine)] = mine
        filled = latent[layer, mine].reshape(-1, width)
        filled[:length] = normal(length, width)
        latent[layer, mine] = filled.reshape(-1, spec.page_size, width)

    q = np.full((num_rows, spec.heads, width), nothing, np.float32)
    own = np.full((num_rows, width), nothing, np.float32)
    words_of = np.zeros((num_rows, words), np.uint32)
    for start, count, unused in zip(starts, rows, dead or [0] * batch, strict=True):
        mine = slice(start, start + count)
        q[mine] = normal(count, spec.heads, width)
        own[mine] = normal(count, width)
        words_of[mine] = ancestors(parents(rng, count), words) if count else 0
        own[start + count - unused : start + count] = nothing
        words_of[start + count - unused : start + count] = 0
    return Case(
        q=q,
        latent=latent,
        layer=layer,
        own=own,
        ancestors=words_of,
        row_start=starts.astype(np.int32),
        row_count=np.asarray(rows, np.int32),
        length=np.asarray(lengths, np.int32),
        page_table=page_table,
        spec=spec,
        max_rows=max_rows,
        # Scores of a spread of a few units: neither flat nor all in one token.
        scale=2.0 / width**0.5,
    )


def exact(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Output [M, H, R] and log-sum-exp [M, H] of a case in float64; rows of nobody: 0 and -inf."""
    rank, width = case.spec.rank, case.q.shape[2]
    out = np.zeros((*case.q.shape[:2], rank))
    lse = np.full(case.q.shape[:2], -np.inf)
    for b, start in enumerate(case.row_start):
        count, length = int(case.row_count[b]), int(case.length[b])
        rows = slice(start, start + count)
        used = -(-length // case.spec.page_size)
        context = case.latent[case.layer, case.page_table[b, :used]].reshape(-1, width)[:length]
        keys = np.concatenate([context, case.own[rows]]).astype(np.float64)
        places = np.arange(count)
        bits = case.ancestors[rows][:, places // 32] >> (places % 32).astype(np.uint32)
        seen = np.concatenate([np.ones((count, length), bool), (bits & 1).astype(bool)], axis=1)
        keys = np.where(seen.any(axis=0)[:, None], keys, 0.0)
        scores = np.einsum("rhc,tc->rht", case.q[rows].astype(np.float64), keys, optimize=True)
        scores = np.where(seen[:, None], scores * case.scale, -np.inf)
        sees = seen.any(axis=1)
        top = np.where(sees[:, None, None], scores.max(axis=-1, keepdims=True, initial=-np.inf), 0)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        sums = np.einsum("rht,tc->rhc", weights, keys[:, :rank], optimize=True)
        out[rows] = np.where(sees[:, None, None], sums / np.where(total > 0, total, 1.0), 0.0)
        lse[rows] = np.where(
            sees[:, None], (top + np.log(np.where(total > 0, total, 1.0)))[..., 0], -np.inf
        )
    return out, lse


def relative_error(value: np.ndarray, truth: np.ndarray) -> float:
    """|value - truth| / |truth| as norms over everything."""
    return float(np.linalg.norm(value.astype(np.float64) - truth) / np.linalg.norm(truth))
