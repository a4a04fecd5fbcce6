"""Kimi K2.6's control tokens, and text that never mixes with them.

A vocabulary is `len(ranks)` byte-pair tokens followed by 256 special slots (tokenization_kimi.py,
`num_reserved_special_tokens`). K2.6's names sit at fixed offsets from the first slot, so a small
vocabulary of the same format (tiny-k2: 1,792 + 256) has the same names at the same offsets.

A prompt is a list of pieces: `Control` is one special token, `Text` is what somebody wrote. Only a
`Control` ever becomes a control token: `<|im_end|>` typed by a user is ten characters of text, not
the end of the turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

N_SPECIAL = 256

EOS = "[EOS]"
IM_END = "<|im_end|>"
IM_USER = "<|im_user|>"
IM_ASSISTANT = "<|im_assistant|>"
IM_SYSTEM = "<|im_system|>"
IM_MIDDLE = "<|im_middle|>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
TOOL_SECTION_BEGIN = "<|tool_calls_section_begin|>"
TOOL_SECTION_END = "<|tool_calls_section_end|>"
TOOL_CALL_BEGIN = "<|tool_call_begin|>"
TOOL_ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
TOOL_CALL_END = "<|tool_call_end|>"

# Name -> offset from the first special slot (163,584 in K2.6, so `<think>` is 163,606).
OFFSETS: Mapping[str, int] = MappingProxyType(
    {
        "[BOS]": 0,
        EOS: 1,
        IM_END: 2,
        IM_USER: 3,
        IM_ASSISTANT: 4,
        "<|start_header_id|>": 6,
        "<|end_header_id|>": 7,
        "[EOT]": 9,
        IM_SYSTEM: 10,
        TOOL_SECTION_BEGIN: 11,
        TOOL_SECTION_END: 12,
        TOOL_CALL_BEGIN: 13,
        TOOL_ARGUMENT_BEGIN: 14,
        TOOL_CALL_END: 15,
        IM_MIDDLE: 17,
        "<|media_begin|>": 18,
        "<|media_content|>": 19,
        "<|media_end|>": 20,
        "<|media_pad|>": 21,
        THINK_OPEN: 22,
        THINK_CLOSE: 23,
        "[UNK]": 254,
        "[PAD]": 255,
    }
)

# Tokens that stay visible in decoded text (`"special": false` in tokenizer_config.json): parsers of
# tool calls look for them there. The published flag of the think pair was not seen; visible is the
# choice that hides nothing. A folder's own tokenizer_config.json decides over this list.
VISIBLE = frozenset(
    {
        TOOL_SECTION_BEGIN,
        TOOL_SECTION_END,
        TOOL_CALL_BEGIN,
        TOOL_ARGUMENT_BEGIN,
        TOOL_CALL_END,
        THINK_OPEN,
        THINK_CLOSE,
    }
)


@dataclass(frozen=True)
class Control:
    """One control token, by name."""

    name: str


@dataclass(frozen=True)
class Text:
    """Text that is only ever encoded as text, whatever it contains."""

    text: str


type Piece = Control | Text


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One special slot: its token id, its name, and whether decoded text leaves it out."""

    id: int
    name: str
    hidden: bool


def special_slots(base: int, added_tokens: Mapping | None = None) -> tuple[Slot, ...]:
    """The 256 slots `base .. base + 255`.

    `added_tokens` is tokenizer_config.json's `added_tokens_decoder` (id as a string ->
    `{"content": name, "special": bool}`). It may name slots that K2.6 leaves free; slots that
    nobody names are `<|reserved_token_{id}|>`.

    Raises:
        ValueError: an entry outside the slots, a name used twice, or an entry that contradicts
            K2.6's layout (the template and the stop ids rest on it).
    """
    names = {base + offset: name for name, offset in OFFSETS.items()}
    hidden = {id: name not in VISIBLE for id, name in names.items()}
    for key, entry in (added_tokens or {}).items():
        where = f"tokenizer_config.json, added_tokens_decoder[{key!r}]"
        if not str(key).isdecimal() or not base <= int(key) < base + N_SPECIAL:
            raise ValueError(
                f"{where}: not one of the {N_SPECIAL} special ids {base}..{base + N_SPECIAL - 1} "
                "that follow the ranks of tiktoken.model; do the two files belong together?"
            )
        name = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}: has no 'content' that names the token: {entry!r}")
        id = int(key)
        expected_id = base + OFFSETS[name] if name in OFFSETS else id
        if names.get(id, name) != name or expected_id != id:
            raise ValueError(
                f"{where}: names {name!r}, but Kimi K2.6 has {names.get(id, 'a free slot')!r} at "
                f"this id; only K2.6's layout of control tokens is supported"
            )
        names[id] = name
        hidden[id] = bool(entry.get("special", True))
    slots = tuple(
        Slot(
            id=id,
            name=names.get(id, f"<|reserved_token_{id}|>"),
            hidden=hidden.get(id, True),
        )
        for id in range(base, base + N_SPECIAL)
    )
    seen: dict[str, int] = {}
    for slot in slots:
        if slot.name in seen:
            raise ValueError(
                f"tokenizer_config.json: {slot.name!r} names both id {seen[slot.name]} and id "
                f"{slot.id}; each control token needs a name of its own"
            )
        seen[slot.name] = slot.id
    return slots
