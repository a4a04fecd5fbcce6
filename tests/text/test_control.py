import pytest

from kimi_jax.text.control import special_slots

# Ids published for Kimi K2.6 (163,584 ranks).
K26 = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|start_header_id|>": 163590,
    "<|end_header_id|>": 163591,
    "[EOT]": 163593,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<think>": 163606,
    "</think>": 163607,
    "[UNK]": 163838,
    "[PAD]": 163839,
}


def test_the_real_vocabulary_has_the_published_ids():
    slots = {slot.name: slot.id for slot in special_slots(163584)}
    assert {name: slots[name] for name in K26} == K26


def test_there_are_256_slots_and_unnamed_ones_are_reserved_tokens():
    slots = special_slots(163584)
    assert [slot.id for slot in slots] == list(range(163584, 163840))
    unnamed = [slot for slot in slots if slot.id not in K26.values()]
    assert all(slot.name == f"<|reserved_token_{slot.id}|>" for slot in unnamed)
    assert len(unnamed) == 256 - len(K26)


def test_tool_and_think_markers_stay_visible_and_the_others_are_hidden():
    visible = {slot.name for slot in special_slots(0) if not slot.hidden}
    assert visible == {name for name in K26 if "tool_call" in name or "think" in name}


def test_the_file_may_name_a_free_slot_and_decides_what_is_hidden():
    added = {
        "105": {"content": "<|extra|>", "special": False},
        "122": {"content": "<think>", "special": True},
    }
    slots = {slot.id: slot for slot in special_slots(100, added)}
    assert (slots[105].name, slots[105].hidden) == ("<|extra|>", False)
    assert (slots[122].name, slots[122].hidden) == ("<think>", True)


@pytest.mark.parametrize(
    ("added", "culprit"),
    [
        ({"99": {"content": "<|x|>"}}, r"'99'.*100\.\.355"),
        ({"356": {"content": "<|x|>"}}, r"'356'.*100\.\.355"),
        ({"x": {"content": "<|x|>"}}, "'x'"),
        ({"105": {"special": True}}, "'105'.*content"),
        ({"102": {"content": "<|stop|>"}}, r"'102'.*<\|stop\|>.*<\|im_end\|>"),
        ({"105": {"content": "<|im_end|>"}}, r"'105'.*<\|im_end\|>.*free slot"),
        ({"105": {"content": "<|x|>"}, "108": {"content": "<|x|>"}}, "105 and id 108"),
    ],
)
def test_a_layout_that_is_not_k26s_is_refused_by_name(added, culprit):
    with pytest.raises(ValueError, match=culprit):
        special_slots(100, added)
