"""What a run leaves behind: JSON for programs, a summary for people."""

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_jax.llm import Result


def as_json(
    result: Result, *, logprobs: bool, stage_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """One object of the list that --output_json writes; stage_ms: of the whole run."""
    entry: dict[str, Any] = {
        "text": result.text,
        "reasoning": result.reasoning,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "usage": dataclasses.asdict(result.usage),
        "stats": dataclasses.asdict(result.stats),
    }
    if stage_ms:
        entry["stats"]["stage_ms"] = dict(stage_ms)
    if logprobs:
        tops = result.top_logprobs or [{}] * len(result.token_ids)
        entry["logprobs"] = [
            {
                "token_id": token,
                "logprob": value,
                "top": [{"token_id": id, "logprob": each} for id, each in top.items()],
            }
            for token, value, top in zip(result.token_ids, result.logprobs, tops, strict=True)
        ]
    return entry


def check_writable(path: str, flag: str = "output_json") -> None:
    """Raises ValueError before any long work if a flag's file cannot be written."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--{flag}={path}: there is no folder {folder}")
    if Path(path).is_dir():
        raise ValueError(f"--{flag}={path} is a folder; give a file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--{flag}={path}: the folder {folder} cannot be written to ({error.strerror})"
        ) from error


def write_json(path: str, entries: Sequence[dict[str, Any]]) -> None:
    """Writes a list to a file, whole or not at all, or to stdout ("-")."""
    # One line a result: token ids, one a line, would be all that one sees.
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    text = f"[\n{lines}\n]\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = Path(path).resolve()  # a link stays one
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")  # a device or a pipe: nothing to rename onto
        return
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes it private
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def summary(
    results: Sequence[Result], seconds: float, stage_ms: Mapping[str, float] | None = None
) -> str:
    """A few lines for the end of a run; seconds: from the first request to the last token."""
    prompt = sum(result.usage.prompt_tokens for result in results)
    tokens = sum(result.usage.completion_tokens for result in results)
    reasoning = sum(result.usage.reasoning_tokens for result in results)
    steps = sum(result.stats.steps for result in results)
    reasons: dict[str, int] = {}
    for result in results:
        why = result.finish_reason
        if isinstance(result.stop_reason, str) and why == "length":
            why += f" ({result.stop_reason})"
        reasons[why] = reasons.get(why, 0) + 1
    many = len(results) > 1
    lines = [
        f"prompt {prompt} tokens, generated {tokens}"
        + (f" (thinking {reasoning})" if reasoning else "")
        + f" in {seconds:.2f} s"
        + (f", {len(results)} prompts, {tokens / seconds:.1f} tok/s in all" if many else ""),
        "ended by "
        + ", ".join(f"{why} {count}" if many else why for why, count in reasons.items()),
    ]
    ttft = [result.stats.ttft_ms for result in results if result.stats.ttft_ms is not None]
    tpot = [result.stats.tpot_ms for result in results if result.stats.tpot_ms is not None]
    if tpot:
        mean = sum(tpot) / len(tpot)
        lines.append(
            f"first token after {sum(ttft) / len(ttft):.0f} ms, then {mean:.2f} ms a token: "
            f"{1e3 / mean:.1f} tok/s" + (" a prompt, in the mean" if many else "")
        )
    if steps:
        lines.append(f"{steps} steps, {tokens / steps:.2f} tokens a step" + _drafting(results))
    if stage_ms:
        stages = ", ".join(f"{stage} {value:.3f}" for stage, value in stage_ms.items())
        lines.append(f"profiled, ms a step: {stages}")
    return "\n".join(lines)


def _drafting(results: Sequence[Result]) -> str:
    """What trees have done, or nothing if there were none."""
    drafts = sum(result.stats.spec_decode_num_drafts for result in results)
    if not drafts:
        return ""
    nodes = sum(result.stats.spec_decode_draft_tokens for result in results)
    accepted = sum(result.stats.spec_decode_accepted_tokens for result in results)
    depth = len(results[0].stats.accepted_histogram) - 1
    rates = [
        sum(
            rates[position] * result.stats.spec_decode_num_drafts
            for result in results
            if (rates := result.stats.spec_decode_per_position_acceptance_rates)
        )
        / drafts
        for position in range(depth)
    ]
    return (
        f"; {drafts} with a tree of {nodes / drafts:.1f} nodes, "
        f"acceptance length {1 + accepted / drafts:.2f}, "
        "accepted by depth " + " ".join(f"{rate:.2f}" for rate in rates)
    )
