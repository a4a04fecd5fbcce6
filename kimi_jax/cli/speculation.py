"""Flags that say how to draft: --drafter, --tree_budget, --speculative_config, --nospeculate."""

import json
from typing import Any, Literal

Budget = int | Literal["auto"]


def options(flags: Any) -> dict[str, Any]:
    """`drafter` and `tree_budget` for `llm.set_up`. Raises ValueError that names the flag."""
    config = _config(flags.speculative_config)
    drafter, budget = flags.drafter, flags.tree_budget
    for flag, key in (("drafter", "model"), ("tree_budget", "tree_budget")):
        if key in config and getattr(flags, flag) is not None:
            raise ValueError(f"--{flag} and --speculative_config's {key!r} say the same: give one")
    drafter = drafter if drafter is not None else config.get("model", "auto")
    budget = budget if budget is not None else config.get("tree_budget", "auto")
    if not flags.speculate:
        plain = flags.tree_budget in (None, "0")  # 0 says the same
        if flags.drafter is not None or not plain or config:
            raise ValueError("--nospeculate excludes --drafter, --tree_budget and the like")
        return {"drafter": None, "tree_budget": 0}
    return {"drafter": drafter, "tree_budget": _budget(budget)}


def _config(text: str | None) -> dict[str, Any]:
    """vLLM's form, e.g. {"method": "ddtree", "model": FOLDER, "tree_budget": 8}."""
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--speculative_config is not JSON ({error}): {text}") from error
    known = {"method", "model", "tree_budget"}
    if not isinstance(config, dict) or set(config) - known:
        raise ValueError(
            f"--speculative_config={text}: expected an object with {', '.join(sorted(known))}"
        )
    if not isinstance(config.get("model", ""), str):
        raise ValueError(f"--speculative_config: model={config['model']!r}: expected a folder")
    method = config.get("method", "ddtree")
    if method != "ddtree":
        raise ValueError(f"--speculative_config: method={method!r} is unknown; use 'ddtree'")
    return config


def _budget(value: Any) -> Budget:
    if value == "auto" or type(value) is int:
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    raise ValueError(f"tree_budget={value!r}: expected 'auto' or a number in 0..63")
