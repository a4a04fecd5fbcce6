import jax
import jax.numpy as jnp
import pytest

from kimi_jax.profiling import NoEvents, scopes, stage_of, stage_seconds


def step(x):
    with jax.named_scope("forward"):
        x = jnp.tanh(x @ x)

    def body(carry, _):
        with jax.named_scope("accept"):
            return jnp.sin(carry @ carry), None

    return jax.lax.scan(body, x, length=4)[0] + 1.0


def test_instructions_are_known_by_their_scope():
    text = (
        'ROOT %fusion.2 = f32[8]{0} fusion(%a), metadata={x="y" op_name="jit(f)/commit/add"}\n'
        "%plain = f32[8]{0} add(%a, %b)\n"
        'dot.1 = f32[8]{0} dot(a, b), metadata={op_name="jit(f)/while/body/forward/layer0/dot"}'
    )
    paths = scopes(text)
    assert {name: stage_of(path) for name, path in paths.items()} == {
        "fusion.2": "commit",
        "dot.1": "forward",
    }
    assert stage_of("jit(f)/add") == "other"


def test_a_trace_is_read_back_as_time_by_stage(tmp_path):
    x = jnp.eye(256) / 16
    program = jax.jit(step).lower(x).compile()
    program(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            program(x).block_until_ready()
    times = stage_seconds(tmp_path, "jit_step", ["", program.as_text()])
    assert times["forward"] > 0 and times["accept"] > 0
    assert set(times) <= {"forward", "accept", "other"}


def test_a_folder_without_the_programs_events_is_refused(tmp_path):
    with pytest.raises(NoEvents, match="no trace"):
        stage_seconds(tmp_path, "jit_step", [""])
    with jax.profiler.trace(str(tmp_path)):
        jnp.zeros(3).block_until_ready()
    with pytest.raises(NoEvents, match="no event of jit_step"):
        stage_seconds(tmp_path, "jit_step", [""])
