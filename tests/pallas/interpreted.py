"""Runs Mosaic kernels of `tree_mla` on the CPU, in Pallas's interpreter."""

import dataclasses
import functools
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import thread_map
from jax.experimental.pallas import mosaic_gpu as plgpu

from kimi_jax.pallas.stream import target
from kimi_jax.pallas.tree_mla import mosaic, plan, specs

# Warpgroups that wait hold a thread of XLA's pool each, which is as large as the machine has cores.
os.environ.setdefault("NPROC", "16")

_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_multi_thread_eigen": False,
}


@pytest.fixture(autouse=True)
def compile_threads_once(monkeypatch):
    """The interpreter compiles a block's program for each warpgroup of each block; once will do."""
    compiled, lock = {}, threading.Lock()

    def run(jaxpr, consts, *args):
        with lock:
            if id(jaxpr) not in compiled:
                traced = jax.jit(thread_map._run, static_argnums=0).trace(jaxpr, consts, *args)
                compiled[id(jaxpr)] = jaxpr, traced.lower().compile(compiler_options=_QUICK)
        compiled[id(jaxpr)][1](consts, *args)

    monkeypatch.setattr(thread_map, "_run_jaxpr", run)


def make_plan(case: specs.Case, *, blocks: int, split: int, tensor_core: str) -> plan.Plan:
    """What an H200 would get, on few blocks and with short splits."""
    spec = case.spec
    return plan.make(
        dataclasses.replace(target.KNOWN["sm_90"], num_cores=blocks),
        rank=spec.rank,
        rope=spec.rope,
        heads=spec.heads,
        page_size=spec.page_size,
        max_rows=case.max_rows,
        split=split,
        tensor_core=tensor_core,
    )


def attend(
    case: specs.Case,
    *,
    blocks: int = 2,
    split: int = 128,
    tensor_core: str = "wgmma",
    detect_races: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of a case as float32; bfloat16 operands."""
    made = make_plan(case, blocks=blocks, split=split, tensor_core=tensor_core)
    out, lse = _program(made, case.scale, case.max_rows, detect_races)(*case.operands())
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse)


@functools.cache
def _program(made: plan.Plan, scale: float, max_rows: int, detect_races: bool):
    parameters = plgpu.InterpretGPUParams(detect_races=detect_races)
    run = functools.partial(
        mosaic.attend, made, scale=scale, max_rows=max_rows, interpret=parameters
    )
    return jax.jit(run, compiler_options=_QUICK)
