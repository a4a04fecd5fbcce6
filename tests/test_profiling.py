import jax
import jax.numpy as jnp
import pytest

from kimi_jax.profiling import NoEvents, Program, read, scopes, stage_of, stage_seconds


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


SCOPE = "jit(decode_steps)/while/body/eval_jaxpr"
PROGRAM = f"""HloModule jit_decode_steps, is_scheduled=true

%gemm_fusion_dot.735_computation (a: bf16[8,896,1], b: bf16[2112,8,896]) -> f32[8,1,2112] {{
  %a = bf16[8,896,1]{{2,1,0}} parameter(0), metadata={{scheduling_name="a"}}
  %b = bf16[2112,8,896]{{2,1,0}} parameter(1)
  %c = f32[8,896,1]{{2,1,0}} convert(%a), metadata={{op_name="{SCOPE}/forward/layer0/attention/d"}}
  ROOT %dot.50 = f32[8,1,2112]{{2,1,0}} dot(%c, %b), metadata={{scheduling_name="dot.50"}}
}}

%body (p: (s32[], bf16[3])) -> (s32[], bf16[3]) {{
  %loop_multiply_fusion.183 = bf16[7] fusion(%p), metadata={{op_name="{SCOPE}/forward/layer0/mul"}}
  %gemm_fusion_dot.735 = f32[8,1,2112] fusion(%loop_multiply_fusion.183, %w), kind=kCustom,\
 calls=%gemm_fusion_dot.735_computation, metadata={{scheduling_name="gemm_fusion_dot.735"}}
  %mpmd_map.54 = f32[8,512] custom-call(%gemm_fusion_dot.735), custom_call_target="mosaic_gpu_v2",\
 metadata={{op_name="{SCOPE}/forward/layer0/attention/jit(attend)/tree_mla/mpmd_map"}}
  %mpmd_map.56 = f32[8,512] custom-call(%mpmd_map.54), custom_call_target="mosaic_gpu_v2",\
 metadata={{op_name="{SCOPE}/forward/layer0/attention/jit(attend)/tree_mla_merge/mpmd_map"}}
  %wrapped_convert = f32[384,7168] fusion(%router), kind=kLoop, calls=%no_such_computation
  %bitcast.1 = f32[384,7168] bitcast(%wrapped_convert)
  %custom-call.6 = f32[17,384] custom-call(%bitcast.1), custom_call_target="__cublas$gemm",\
 metadata={{op_name="{SCOPE}/forward/layer1/experts/dot_general"}}
  %mpmd_map.60 = f32[17,7168] custom-call(%custom-call.6), custom_call_target="mosaic_gpu_v2",\
 metadata={{op_name="{SCOPE}/forward/layer1/experts/jit(_launch)/int4_moe/mpmd_map"}}
  %sort.75 = f32[17] sort(%mpmd_map.60), metadata={{op_name="{SCOPE}/forward/layer1/experts/sort"}}
  %gemm_fusion_dot.797 = f32[17,20480] fusion(%x), metadata={{op_name="{SCOPE}/forward/unembed/d"}}
  %input_reduce_fusion.431 = s32[17] fusion(%x), metadata={{op_name="{SCOPE}/accept/argmax"}}
  %loop_add_fusion.6 = s32[] fusion(%p), kind=kLoop, calls=%no_such_computation
  ROOT %tuple.1 = (s32[], bf16[3]) tuple(%loop_add_fusion.6, %input_reduce_fusion.431)
}}
"""
# Kernel, its `hlo_op` if it has one, and the stage that it must be given; in the order of a stream.
CUBLAS = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4"
KERNELS = [
    ("loop_multiply_fusion_183", "", "forward"),
    ("gemm_fusion_dot_735", "", "attention"),  # by its body: it has no scope of its own
    ("tree_mla_mosaic_gpu_kernel", "", "attention"),
    ("tree_mla_merge_mosaic_gpu_kernel", "", "attention"),
    ("wrapped_convert", "", "experts"),  # by what uses it
    (CUBLAS, "", "experts"),  # by what ran before it
    ("int4_moe_mosaic_gpu_kernel", "", "experts"),
    ("sort_75_1", "", "experts"),
    ("gemm_fusion_dot_797", "", "unembed"),
    ("memcpy32_post", "", "unembed"),
    ("input_reduce_fusion_431", "", "accept"),
    ("MemcpyD2H", "custom-call.6", "experts"),  # what the trace says itself counts
    ("loop_add_fusion_6", "", "other"),  # the loop's counter
]


def test_what_xla_adds_belongs_to_what_it_serves():
    program = Program(PROGRAM)
    for kernel, instruction, stage in KERNELS:
        if kernel not in (CUBLAS, "memcpy32_post"):
            assert stage_of(program.path(instruction, kernel) or "") == stage, kernel
    assert program.path("", CUBLAS) is None
    assert program.path("", "memcpy32_post") is None


def gpu_trace(folder, names) -> None:
    """A trace as a GPU writes it: a microsecond a kernel, on one stream, 2 us apart."""
    kernels, stats, events = {}, {1: "hlo_module", 2: "hlo_op", 3: "program_id"}, []
    for number, (kernel, instruction, _) in enumerate(names):
        kernels.setdefault(kernel, len(kernels) + 1)
        said = f'stats {{ metadata_id: 2 str_value: "{instruction}" }}' if instruction else ""
        if instruction:
            said += ' stats { metadata_id: 1 str_value: "jit_decode_steps" }'
            said += " stats { metadata_id: 3 uint64_value: 7 }"
        events.append(
            f"events {{ metadata_id: {kernels[kernel]} offset_ps: {number * 2_000_000}"
            f" duration_ps: 1000000 {said} }}"
        )
    lines = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}\n'
        for name, i in kernels.items()
    ) + "".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}\n'
        for i, name in stats.items()
    )
    text = (
        f'planes {{ id: 1 name: "/device:GPU:0" lines {{ id: 1 name: "Stream #13"'
        f" {chr(10).join(events)} }} {lines} }}"
    )
    raw = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    (folder / "host.xplane.pb").write_bytes(raw)


def test_kernels_of_a_cuda_graph_are_known_by_their_names(tmp_path):
    gpu_trace(tmp_path, KERNELS * 2)
    profile = read(tmp_path, "jit_decode_steps", ["", PROGRAM])
    found = {(kernel.name, kernel.stage): kernel.calls for kernel in profile.kernels}
    assert found == {(kernel, stage): 2 for kernel, _, stage in KERNELS}
    assert profile.by_stage()["attention"] == (6, pytest.approx(6e-6))
    assert profile.idle == pytest.approx(25 / 51)


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
