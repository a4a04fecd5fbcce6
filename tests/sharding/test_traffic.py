"""The computed bytes of a step, and the README's table of them."""

from pathlib import Path

from kimi_jax.config import DRAFTER_PRESETS, PRESETS
from kimi_jax.sharding import traffic
from kimi_jax.sharding.mesh import Shape

README = Path(__file__).parents[2] / "README.md"
K26, DRAFTER = PRESETS["kimi-k2.6"], DRAFTER_PRESETS["kimi-k2.6"]


def read(shape: Shape, nodes: int = 0, context: int = 0) -> float:
    return traffic.step(K26, DRAFTER, shape, sequences=1, nodes=nodes, context=context).read


def test_the_readme_has_the_computed_table():
    assert traffic.table() in README.read_text(encoding="utf-8")


def test_a_plain_step_of_one_device_reads_what_the_paper_calls_active():
    # 31.7 G parameters a token: experts in 4.5 bits with their scales, the rest in 16.
    assert 32.5e9 < read(Shape()) < 33.5e9


def test_the_cache_is_read_whole_by_heads_and_in_parts_by_context():
    token = 61 * 576 * 2
    tokens = 1 << 17
    by_heads = read(Shape(tensor=8), context=tokens) - read(Shape(tensor=8))
    assert abs(by_heads - tokens * token) < 1e6
    split = Shape(tensor=8, split_context=True)
    assert abs(read(split, context=tokens) - read(split) - tokens * token / 8) < 1e6


def test_experts_by_number_read_more_than_by_width_where_few_are_touched():
    assert read(Shape(expert=8)) > 1.3 * read(Shape(tensor=8))
    assert read(Shape(expert=8), nodes=63) < 1.15 * read(Shape(tensor=8), nodes=63)


def test_a_layer_has_two_reductions():
    plain = traffic.step(K26, DRAFTER, Shape(tensor=8), sequences=1, nodes=0, context=0)
    assert plain.reductions == 2 * 61 + 1
    assert plain.reduced == (2 * 61 + 1) * 7168 * 4
