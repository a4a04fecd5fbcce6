"""Token ids of the bundled model: 1,792 byte-pair ranks and 256 special ids after them.

The special ids have the offsets of Kimi K2.6's (163,584 ranks there), so that no code path differs.
"""

NUM_RANKS = 1792
NUM_SPECIAL = 256
VOCAB = NUM_RANKS + NUM_SPECIAL

NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
# These stay in decoded text when special tokens are skipped: parsers read them.
NOT_SPECIAL = set(range(11, 16)) | {22, 23}
SPECIAL = {NAMED.get(i, f"<|reserved_token_{NUM_RANKS + i}|>"): NUM_RANKS + i for i in range(256)}

BOS, EOS, IM_END = SPECIAL["[BOS]"], SPECIAL["[EOS]"], SPECIAL["<|im_end|>"]
MASK, PAD = SPECIAL["[UNK]"], SPECIAL["[PAD]"]

# The split pattern of Kimi's tokenizer (Han runs are pre-tokens of their own).
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
