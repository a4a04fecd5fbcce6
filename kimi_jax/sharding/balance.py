"""Where experts lie when they are split by number: spread by how often each was chosen.

A step waits for the device with most to read. Texts of one kind choose some experts far more often
than others, and these may lie together; a placement from a histogram of choices spreads them. It
renumbers the experts of a layer together with their rows of the router, so that the model itself
knows nothing of it: every expert lies in one place, and a token uses it once.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.model.weights import Experts, MoE, Weights


def placement(counts: np.ndarray, devices: int) -> np.ndarray:
    """counts [L_moe, E], how often each expert was chosen -> order int [L_moe, E].

    order[layer, place] is the expert that lies at a place; a device holds E / devices places that
    follow each other. The busiest expert first, each goes to the device that has least to do yet.

    Raises:
        ValueError: experts that do not divide over the devices.
    """
    layers, experts = counts.shape
    if experts % devices:
        raise ValueError(f"{experts} experts do not divide over {devices} devices")
    share = experts // devices
    order = np.empty((layers, experts), np.int64)
    for layer in range(layers):
        held: list[list[int]] = [[] for _ in range(devices)]
        load = np.zeros(devices)
        for expert in np.argsort(-counts[layer], kind="stable"):
            open_to = [device for device in range(devices) if len(held[device]) < share]
            device = min(open_to, key=lambda device: (load[device], device))
            held[device].append(int(expert))
            load[device] += counts[layer, expert]
        order[layer] = [expert for experts in held for expert in sorted(experts)]
    return order


def load(counts: np.ndarray, devices: int, order: np.ndarray | None = None) -> np.ndarray:
    """Choices that fall to each device, [L_moe, devices]; order None: experts in their order."""
    if order is not None:
        counts = np.take_along_axis(counts, order, axis=1)
    return counts.reshape(len(counts), devices, -1).sum(axis=2)


def unevenness(loads: np.ndarray) -> float:
    """The busiest device's load by the mean one's, over all layers; 1 is even."""
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


def place(weights: Weights, order: np.ndarray, shardings: Any = None) -> Weights:
    """Weights whose experts lie in this order; those given are deleted, a layer at a time.

    Raises:
        NotImplementedError: experts that a kernel has brought into an order of its own.
    """
    rows = iter(order)
    layers = []
    for index, layer in enumerate(weights.layers):
        moe = layer.mlp
        if isinstance(moe, MoE):
            if not isinstance(moe.experts, Experts):
                raise NotImplementedError(
                    f"expert_placement moves experts as the checkpoint has them, not "
                    f"{type(moe.experts).__name__}: place them before a kernel packs them"
                )
            places = jnp.asarray(next(rows))
            moving = moe.router, moe.router_bias, moe.experts
            where = None
            if shardings is not None:
                whole = shardings.layers[index].mlp
                where = whole.router, whole.router_bias, whole.experts
            take = jax.jit(
                lambda parts, places: jax.tree.map(lambda part: part[places], parts),
                out_shardings=where,
                donate_argnums=0,
            )
            router, bias, experts = take(moving, places)
            moe = dataclasses.replace(moe, router=router, router_bias=bias, experts=experts)
            layer = dataclasses.replace(layer, mlp=moe)
        layers.append(layer)
    return dataclasses.replace(weights, layers=tuple(layers))


def save(path: str | Path, counts: np.ndarray) -> None:
    """A histogram file: {"expert_counts": [[..E numbers..], ..L_moe rows..]}."""
    Path(path).write_text(json.dumps({"expert_counts": counts.tolist()}), encoding="utf-8")


def read(path: str | Path, layers: int, experts: int) -> np.ndarray:
    """The counts [layers, experts] of a histogram file; ValueError, naming it, for any other."""
    expected = f'expected {{"expert_counts": {layers} rows of {experts} numbers from 0 up}}'
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))["expert_counts"]
        counts = np.array(found, np.float64)
    except OSError as error:
        raise ValueError(f"expert_placement={path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"expert_placement={path}: {expected}") from error
    if counts.shape != (layers, experts) or not np.all(np.isfinite(counts) & (counts >= 0)):
        raise ValueError(f"expert_placement={path}: {expected}, found {list(counts.shape)}")
    return counts
