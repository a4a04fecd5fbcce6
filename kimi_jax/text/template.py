"""Kimi K2.6's chat template, as pieces.

Source: chat_template.jinja of the published checkpoint (the K2.6 form, with `preserve_thinking`).
It is written in Python because a Jinja template yields one string, in which a marker and the same
characters typed by a user can no longer be told apart; pieces keep them apart until they are ids.
There is no newline between turns and no default system message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_jax.text.control import (
    IM_ASSISTANT,
    IM_END,
    IM_MIDDLE,
    IM_SYSTEM,
    IM_USER,
    THINK_CLOSE,
    THINK_OPEN,
    Control,
    Piece,
    Text,
)

type Message = Mapping[str, Any]

# The marker that opens a turn. Tool results speak with the system's marker.
_OPENER = {
    "system": IM_SYSTEM,
    "user": IM_USER,
    "assistant": IM_ASSISTANT,
    "tool": IM_SYSTEM,
}
_KEYS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "reasoning", "reasoning_content", "tool_calls"},
    "tool": {"role", "content", "name", "tool_call_id"},
}


def render(
    messages: Sequence[Message],
    *,
    thinking: bool = True,
    preserve_thinking: bool = False,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[Piece]:
    """Renders a conversation.

    Args:
        messages: dicts with `role` (system, user, assistant, tool) and `content` (a string, None,
            or a list of text parts); `name` replaces the role's word; an assistant's thoughts are
            in `reasoning`, else `reasoning_content`; a tool's result has `tool_call_id`.
        thinking: the answer starts with thoughts; otherwise (instant mode) with the content.
        preserve_thinking: render the thoughts of all earlier turns, see `first_kept_reasoning`.
        add_generation_prompt: end with the opening of the assistant's next turn.
        tools: tool declarations; not supported yet.

    Raises:
        ValueError: a message that is malformed, by its index.
        NotImplementedError: tool declarations, an assistant's tool calls, images or video.
    """
    if tools:
        raise NotImplementedError(
            "tools: tool declarations are not supported yet; leave them out, or describe the tools "
            "in a system message"
        )
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise ValueError(
            "messages: expected a non-empty list of messages such as "
            f'[{{"role": "user", "content": "Hello"}}], got {messages!r:.80}'
        )
    for index, message in enumerate(messages):
        _check(index, message)
    first_kept = first_kept_reasoning(
        messages, thinking=thinking, preserve_thinking=preserve_thinking
    )
    pieces: list[Piece] = []
    for index, message in enumerate(messages):
        pieces += _turn(index, message, keep_reasoning=index >= first_kept)
    if add_generation_prompt:
        pieces += [
            Control(IM_ASSISTANT),
            Text("assistant"),
            Control(IM_MIDDLE),
            Control(THINK_OPEN),
        ]
        if not thinking:
            pieces.append(Control(THINK_CLOSE))
    return pieces


def render_text(messages: Sequence[Message], **options: Any) -> str:
    """`render` as one string, for people. It cannot be encoded back safely: encode the pieces."""
    pieces = render(messages, **options)
    return "".join(piece.name if isinstance(piece, Control) else piece.text for piece in pieces)


def first_kept_reasoning(
    messages: Sequence[Message], *, thinking: bool, preserve_thinking: bool
) -> int:
    """Index of the first message whose reasoning is rendered; it is left out of earlier ones.

    `preserve_thinking` keeps all. Otherwise, in thinking mode, thoughts that led to a finished
    answer are dropped (everything up to the last assistant message without tool calls), and those
    of a chain of tool calls still in progress are kept; in instant mode none is.
    """
    if preserve_thinking:
        return 0
    if not thinking:
        return len(messages)
    finished = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and not message.get("tool_calls")
    ]
    return finished[-1] + 1 if finished else 0


def _check(index: int, message: Message) -> None:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: expected a dict with role and content, got {message!r:.80}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _OPENER:
        raise ValueError(f"{where}: role {role!r}; expected one of {', '.join(_OPENER)}")
    if message.get("tool_calls"):
        raise NotImplementedError(
            f"{where}: tool_calls of an assistant message are not supported yet; "
            "leave the call and its result out, or put them into the content as text"
        )
    unknown = [key for key, value in message.items() if key not in _KEYS[role] and value]
    if unknown:
        raise ValueError(
            f"{where}: a {role} message has no field {unknown[0]!r}; "
            f"known are {', '.join(sorted(_KEYS[role]))}"
        )
    for key in ("name", "reasoning", "reasoning_content", "tool_call_id"):
        if not isinstance(message.get(key, ""), str | None):
            raise ValueError(f"{where}: {key} must be a string, got {message[key]!r:.80}")
    if role == "tool" and not message.get("tool_call_id"):
        raise ValueError(
            f"{where}: a tool message needs tool_call_id, the id of the call it answers"
        )


def _turn(index: int, message: Message, *, keep_reasoning: bool) -> list[Piece]:
    role = message["role"]
    pieces: list[Piece] = [
        Control(_OPENER[role]),
        Text(message.get("name") or role),
        Control(IM_MIDDLE),
    ]
    if role == "assistant":
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        pieces.append(Control(THINK_OPEN))
        if keep_reasoning and reasoning:
            pieces.append(Text(reasoning))
        pieces.append(Control(THINK_CLOSE))
    text = _content(index, message.get("content"))
    if role == "tool":
        text = f"## Return of {message['tool_call_id']}\n{text}"
    if text:
        pieces.append(Text(text))
    pieces.append(Control(IM_END))
    return pieces


def _content(index: int, content: Any) -> str:
    where = f"messages[{index}].content"
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"{where}: expected a string or a list of parts, got {content!r:.80}")
    return "".join(_part(f"{where}[{number}]", part) for number, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind in ("image", "image_url", "video", "video_url"):
        raise NotImplementedError(
            f"{where}: {kind} parts are not supported yet, this engine reads text only; "
            "remove the part or describe it in words"
        )
    raise ValueError(f'{where}: expected {{"type": "text", "text": "..."}}, got {part!r:.80}')
