"""Compiling for GPUs on a machine without one."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable

DEVICES = {
    "sm_90": dict(major=9, minor=0, cores=132, optin=232448, per_core=233472, threads=2048),
    "sm_103": dict(major=10, minor=3, cores=148, optin=232448, per_core=233472, threads=2048),
    "sm_120": dict(major=12, minor=0, cores=188, optin=101376, per_core=131072, threads=1536),
}
# XLA's GpuTargetConfigProto; bandwidth and memory size do not enter.
TARGET_CONFIG = """
gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: {per_core} threads_per_core_limit: {threads} core_count: {cores}
fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
device_memory_size: 151397597184 shared_memory_per_block_optin: {optin}
cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024
thread_dim_limit_y: 1024 thread_dim_limit_z: 64 driver_version: "13.0.0" runtime_version: "13.0.0"
compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0" device_address_bits: 64
name: "{name}" }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


def each(script: str, targets: Iterable[str]) -> int:
    """Runs `script` again for each target, with its own arguments and `--child TARGET`.

    JAX 0.11.2 compiles for one architecture a process. Returns 1 if one of them fails.
    """
    environment = dict(os.environ, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", JAX_PLATFORMS="cpu")
    root = pathlib.Path(__file__).resolve().parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    bad = 0
    for name in targets:
        command = [sys.executable, script, *sys.argv[1:], "--child", name]
        bad += subprocess.run(command, env=environment).returncode != 0
    return int(bad > 0)


def mesh(name: str):
    """A mesh of one such device, which is not there."""
    from jax.experimental import topologies

    config = TARGET_CONFIG.format(name=name, **DEVICES[name])
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config, topology="1x1x1"
    )
    return topologies.make_mesh(topology, (1,), ("x",))
