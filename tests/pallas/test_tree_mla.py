"""Tree-masked MLA: the reference against float64, the schedule, and the kernel, interpreted.

What only a GPU covers: the two matrix products themselves (`kernel._mma`, and wgmma in
`_score_product` and `_add_product`), for which the interpreter multiplies arrays; the layouts of
registers; that copies start at multiples of eight rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import attend, compile_threads_once  # noqa: F401

from kimi_jax.pallas.stream import target
from kimi_jax.pallas.tree_mla import api, plan, reference, schedule, specs

BF16_ERROR = 1e-2  # of bfloat16 operands and probabilities, as a norm over all rows


@pytest.fixture(scope="module")
def mixed() -> specs.Case:
    """All kinds of sequences in one batch, NaN in everything that belongs to nobody."""
    spec = dataclasses.replace(specs.TINY, heads=2)
    lengths = [0, 1, spec.page_size - 1, spec.page_size, spec.page_size + 1, 300]
    rows, dead = [1, 9, 33, 5, 0, 17], [1, 3, 0, 0, 0, 1]
    case = specs.make(spec, rows, lengths, seed=1, gap=1, dead=dead)
    return _with_pages(case, case.latent)


@pytest.fixture(scope="module")
def mixed_result(mixed):
    patch = pytest.MonkeyPatch()
    compile_threads_once.__wrapped__(patch)
    yield attend(mixed, detect_races=True)
    patch.undo()


def assert_close(case: specs.Case, out: np.ndarray, lse: np.ndarray, bound: float) -> None:
    truth, true_lse = specs.exact(case)
    assert specs.relative_error(out, truth) < bound
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(true_lse))
    finite = np.isfinite(true_lse)
    np.testing.assert_allclose(lse[finite], true_lse[finite], atol=bound)


# -- the reference


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-5), (jnp.bfloat16, BF16_ERROR)])
def test_the_reference_equals_float64(mixed, dtype, bound):
    out, lse = _reference(mixed, dtype)
    assert_close(mixed, out, lse, bound)


@pytest.mark.parametrize("parents", [specs.chain, specs.star, specs.random_tree])
@pytest.mark.parametrize("rows", [2, 32, 64])
def test_the_reference_masks_any_tree(parents, rows):
    case = specs.make(specs.TINY, rows=[rows], lengths=[20], seed=rows, parents=parents)
    assert_close(case, *_reference(case, jnp.float32), 1e-5)


def test_a_chain_is_plain_causal_attention():
    case = specs.make(specs.TINY, rows=[11], lengths=[40], seed=3, parents=specs.chain)
    out, _ = _reference(case, jnp.float32)
    np.testing.assert_allclose(out, _causal(case), atol=2e-5)


def test_rows_of_no_sequence_give_nothing(mixed):
    out, lse = _reference(mixed, jnp.float32)
    nobodys = ~_owned(mixed)
    assert nobodys.any()
    assert (out[nobodys] == 0).all()
    assert np.isneginf(lse[nobodys]).all()


# -- which implementation runs


def test_a_cpu_takes_the_reference():
    assert api.choose() == "reference"
    assert api.choose("reference") == "reference"


@pytest.mark.parametrize("name", ["mosaic", "triton"])
def test_an_implementation_that_cannot_run_is_refused(name):
    with pytest.raises(NotImplementedError, match=name):
        api.choose(name)


@pytest.mark.parametrize(
    "name, value",
    [
        ("rank", 96),
        ("rope", 48),
        ("heads", 65),
        ("page_size", 48),
        ("max_rows", 65),
        ("dtype", jnp.float32),
    ],
)
def test_what_the_kernel_cannot_serve_is_named(name, value):
    sizes = {
        "rank": 512,
        "rope": 64,
        "heads": 8,
        "page_size": 64,
        "max_rows": 9,
        "dtype": jnp.bfloat16,
    }
    plan.check(**sizes)
    text = jnp.dtype(value).name if name == "dtype" else str(value)
    with pytest.raises(NotImplementedError, match=f"= {text}, expected .*'reference'"):
        plan.check(**{**sizes, name: value})


# -- plans


@pytest.mark.parametrize("name", target.KNOWN)
@pytest.mark.parametrize("spec", [specs.K26_TP8, specs.K26, specs.TINY, *specs.AWKWARD])
@pytest.mark.parametrize("max_rows", [1, 9, 33, 64])
def test_every_plan_fits_into_shared_memory(name, spec, max_rows):
    gpu = target.KNOWN[name]
    made = plan.make(gpu, **dataclasses.asdict(spec), max_rows=max_rows)
    assert made.shared_bytes <= gpu.shared_bytes
    assert made.queries % 8 == 0
    assert made.slots >= made.chunks
    assert made.tensor_core == ("wgmma" if name == "sm_90" else "mma")


def test_nothing_that_changes_a_result_depends_on_rows():
    made = [
        plan.make(target.KNOWN["sm_90"], **dataclasses.asdict(specs.K26_TP8), max_rows=rows)
        for rows in (1, 9, 17, 33, 64)
    ]
    assert len({(p.split, p.tensor_core, p.parts) for p in made}) == 1


# -- the schedule

_SEQUENCES = 4
_PLAN = plan.make(
    dataclasses.replace(target.KNOWN["sm_90"], num_cores=5),
    **dataclasses.asdict(specs.TINY),
    max_rows=20,
    split=128,
    max_queries=24,
)
_POOL, _LONGEST, _FLAT_ROWS = 1600, 640, 90


@jax.jit
def _schedule(row_start, row_count, length):
    num_units = schedule.max_units(
        _PLAN, batch=_SEQUENCES, max_rows=20, pool_tokens=_POOL, max_tokens=_LONGEST
    )
    table = jnp.arange(_SEQUENCES * 40, dtype=jnp.int32).reshape(_SEQUENCES, 40)
    ancestors = jnp.zeros((_FLAT_ROWS, 1), jnp.uint32)
    return schedule.make(
        _PLAN, row_start, row_count, length, table, ancestors, max_rows=20, num_units=num_units
    )


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 400), st.integers(0, 2)),
        min_size=_SEQUENCES,
        max_size=_SEQUENCES,
    )
)
def test_units_cover_every_tile_of_every_query_once(sequences):
    counts, lengths, gaps = (np.array(column, np.int32) for column in zip(*sequences, strict=True))
    starts = (np.cumsum(counts + gaps) - counts).astype(np.int32)
    made = jax.tree.map(np.asarray, _schedule(starts, counts, lengths))
    covered = []
    ran = np.concatenate([np.arange(first, end) for first, end in made.runs[:, :2]])
    for unit in made.units[ran]:
        assert unit[schedule.QUERY] % schedule.ALIGNED == 0
        assert unit[schedule.FIRST_TILE] % _PLAN.split_tiles == 0
        assert 1 <= unit[schedule.TILES] <= _PLAN.split_tiles
        for tile in range(unit[schedule.TILES]):
            for query in range(_PLAN.queries):
                covered.append((unit[schedule.QUERY] + query, unit[schedule.FIRST_TILE] + tile))
    assert list(ran) == list(range(len(ran)))  # each unit once, in order
    wanted = set()
    for start, count, length in zip(starts, counts, lengths, strict=True):
        context = -(-int(length) // 64)
        own = -(-(start % 8 + count) // 64)
        wanted |= {
            (query, tile)
            for query in range(start * 4, (start + count) * 4)
            for tile in range(context + own if count else 0)
        }
    assert wanted <= set(covered)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 400), min_size=_SEQUENCES, max_size=_SEQUENCES))
def test_blocks_get_about_the_same_number_of_tiles(lengths):
    counts = np.full(_SEQUENCES, 6, np.int32)
    starts = np.arange(_SEQUENCES, dtype=np.int32) * 6
    made = jax.tree.map(np.asarray, _schedule(starts, counts, np.array(lengths, np.int32)))
    cost = made.units[:, schedule.TILES] + 1
    work = [int(cost[first:end].sum()) for first, end in made.runs[:, :2]]
    exists = made.units[:, schedule.TILES] > 0
    fair = int(cost[exists].sum()) / _PLAN.num_cores
    assert max(work) <= fair + _PLAN.split_tiles + 1


def test_where_sums_are_split_depends_on_the_own_context_alone():
    made = plan.make(target.KNOWN["sm_90"], **dataclasses.asdict(specs.K26_TP8), max_rows=2)

    def units_of(lengths: list[int]) -> dict[int, list[tuple[int, int]]]:
        count = len(lengths)
        run = jax.jit(schedule.make, static_argnames=("plan", "max_rows", "num_units"))
        units = run(
            plan=made,
            row_start=jnp.arange(count, dtype=jnp.int32) * 2,
            row_count=jnp.full((count,), 2, jnp.int32),
            length=jnp.array(lengths, jnp.int32),
            page_table=jnp.zeros((count, 160), jnp.int32),
            ancestors=jnp.zeros((2 * count, 1), jnp.uint32),
            max_rows=2,
            num_units=100,
        ).units
        found: dict[int, list[tuple[int, int]]] = {length: [] for length in lengths}
        for unit in np.asarray(units):
            if unit[schedule.TILES]:
                found[int(unit[schedule.LENGTH])].append(
                    (int(unit[schedule.FIRST_TILE]), int(unit[schedule.TILES]))
                )
        return found

    together = units_of([plan.LONG_CONTEXT, plan.LONG_CONTEXT + 1, 300])
    for length, units in together.items():
        assert units_of([length])[length] == units
    tiles = [max(count for _, count in units) for units in together.values()]
    assert tiles == [made.split_tiles, made.long_split_tiles, made.split_tiles]


def test_a_sequence_without_room_is_marked():
    counts, lengths = np.full(_SEQUENCES, 20, np.int32), np.full(_SEQUENCES, 640, np.int32)
    starts = np.arange(_SEQUENCES, dtype=np.int32) * 20
    made = _schedule(starts, counts, lengths)  # 2560 tokens in a pool of 1600: shared pages
    splits = np.asarray(made.rows[:, schedule.SPLITS])[:80].reshape(_SEQUENCES, 20)
    assert (splits[0] > 0).all()
    assert (splits[-1] == -1).all()
    assert (np.asarray(made.rows[80:, schedule.SPLITS]) == 0).all()


# -- the kernel, interpreted


def test_the_kernel_equals_float64_for_a_mixed_batch(mixed, mixed_result):
    assert_close(mixed, *mixed_result, BF16_ERROR)


def test_the_kernel_gives_nothing_for_rows_of_no_sequence(mixed, mixed_result):
    out, lse = mixed_result
    nobodys = ~_owned(mixed)
    assert (out[nobodys] == 0).all()
    assert np.isneginf(lse[nobodys]).all()


def test_a_row_is_the_same_bits_in_any_company(mixed, mixed_result):
    others = specs.make(
        mixed.spec,
        rows=[20, 1, 6, 20, 1, 17],
        lengths=[64, 0, 129, 3, 2, 300],
        seed=9,
        gap=1,
        max_rows=mixed.max_rows,
    )
    # The last sequence moves in: its rows, its context, under other page ids.
    mine, place = _rows_of(mixed, 5), _rows_of(others, 5)
    q, own, words = others.q.copy(), others.own.copy(), others.ancestors.copy()
    q[place], own[place], words[place] = mixed.q[mine], mixed.own[mine], mixed.ancestors[mine]
    table = others.page_table.copy()
    table[5] = mixed.page_table[5] + others.latent.shape[1]
    moved = _with_pages(
        dataclasses.replace(others, q=q, own=own, ancestors=words, page_table=table),
        np.concatenate([others.latent, mixed.latent[:, :25]], axis=1),
    )
    out, lse = attend(moved, detect_races=True)
    assert np.isfinite(out[place]).all()
    np.testing.assert_array_equal(out[place], mixed_result[0][mine])
    np.testing.assert_array_equal(lse[place], mixed_result[1][mine])


@pytest.mark.parametrize("tensor_core", ["wgmma", "mma"])
def test_the_kernel_serves_the_real_sizes(tensor_core):
    case = specs.make(
        specs.K26_TP8, rows=[9, 2], lengths=[130, 0], seed=5, parents=specs.star, max_rows=9
    )
    assert_close(case, *attend(case, tensor_core=tensor_core, blocks=1), BF16_ERROR)


def test_a_chain_of_64_rows_is_plain_causal_attention():
    # Rows that start at no multiple of eight: they take two tiles.
    case = specs.make(
        specs.AWKWARD[0], rows=[3, 64], lengths=[65, 128], seed=7, parents=specs.chain
    )
    out, lse = attend(case, blocks=1)
    assert_close(case, out, lse, BF16_ERROR)
    causal = _causal(case, sequence=1)
    assert specs.relative_error(out[3:], causal) < BF16_ERROR


def test_a_sequence_without_room_comes_out_as_nan():
    spec = dataclasses.replace(specs.TINY, heads=1)
    case = specs.make(spec, rows=[1], lengths=[300], seed=2)
    shared = dataclasses.replace(
        case,
        q=np.repeat(case.q, 3, axis=0),
        own=np.repeat(case.own, 3, axis=0),
        ancestors=np.repeat(case.ancestors, 3, axis=0),
        row_start=np.arange(3, dtype=np.int32),
        row_count=np.ones(3, np.int32),
        length=np.repeat(case.length, 3),
        page_table=np.repeat(case.page_table, 3, axis=0),
    )
    out, lse = attend(shared, split=64, blocks=1)
    assert np.isfinite(out[:2]).all()
    assert np.isnan(out[2]).all() and np.isnan(lse[2]).all()


# -- helpers


def _reference(case: specs.Case, dtype) -> tuple[np.ndarray, np.ndarray]:
    run = jax.jit(reference.attend, static_argnames=("rank", "scale", "max_rows"))
    out, lse = run(
        *case.operands(dtype), rank=case.spec.rank, scale=case.scale, max_rows=case.max_rows
    )
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse)


def _causal(case: specs.Case, sequence: int = 0) -> np.ndarray:
    """Attention of the last rows of one long sequence: [rows, H, R]."""
    rows = _rows_of(case, sequence)
    length = int(case.length[sequence])
    context = case.latent[case.layer, case.page_table[sequence]].reshape(-1, case.own.shape[1])
    keys = np.concatenate([context[:length], case.own[rows]]).astype(np.float64)
    scores = np.einsum("rhc,tc->rht", case.q[rows], keys) * case.scale
    later = np.arange(len(keys)) > length + np.arange(len(scores))[:, None]
    weights = np.exp(np.where(later[:, None], -np.inf, scores))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("rht,tc->rhc", weights, keys[:, : case.spec.rank])


def _with_pages(case: specs.Case, latent: np.ndarray) -> specs.Case:
    """The case with `latent`, filled up to 80 pages of NaN: cases of one shape share a program."""
    missing = 80 - latent.shape[1]
    return dataclasses.replace(
        case, latent=np.pad(latent, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=np.nan)
    )


def _rows_of(case: specs.Case, sequence: int) -> slice:
    start = int(case.row_start[sequence])
    return slice(start, start + int(case.row_count[sequence]))


def _owned(case: specs.Case) -> np.ndarray:
    owned = np.zeros(len(case.q), bool)
    for sequence in range(len(case.length)):
        owned[_rows_of(case, sequence)] = True
    return owned
