import json

import pytest

from kimi_jax.cli.prompts import read_file


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(path)


def read(path, *, chat=True, system=None):
    return read_file(path, chat=chat, system=system)


def test_lines_are_texts_token_ids_or_conversations(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = write(tmp_path, {"prompt": "hi"}, "", {"prompt": [1, 2]}, {"messages": messages})
    assert [job.prompt for job in read(path)] == [messages, [1, 2], messages]
    assert [job.prompt for job in read(path, chat=False)] == ["hi", [1, 2], messages]
    assert [job.where for job in read(path)] == [f"prompts.jsonl, line {n}" for n in (1, 3, 4)]


def test_the_system_message_is_put_first_unless_there_is_one(tmp_path):
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    path = write(tmp_path, {"prompt": "hi"}, {"messages": own[1:]}, {"messages": own})
    given = {"role": "system", "content": "be brief"}
    jobs = read(path, system="be brief")
    assert [job.prompt for job in jobs] == [[given, own[1]], [given, own[1]], own]


def test_a_line_may_have_its_own_sampling(tmp_path):
    line = {"prompt": "x", "temperature": 0, "logit_bias": {"5": 1.5}, "thinking": False}
    [job] = read(write(tmp_path, line))
    assert job.sampling == {"temperature": 0, "logit_bias": {5: 1.5}}
    assert job.thinking is False


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object, found list"),
        ('{"promt": "x"}', "unknown key 'promt'; known are .*messages, "),
        ("{}", 'expected either "prompt" or "messages"'),
        ('{"prompt": "x", "messages": []}', 'expected either "prompt" or "messages"'),
        ('{"prompt": 5}', '"prompt" must be text or a list of token ids'),
        ('{"prompt": [true]}', '"prompt" must be text or a list of token ids'),
        ('{"messages": []}', '"messages" is empty'),
        ('{"messages": "hi"}', '"messages" must be a list of objects'),
        ('{"prompt": "x", "thinking": 1}', "thinking=1: expected true or false"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path, line, message):
    with pytest.raises(ValueError, match=f"prompts.jsonl, line 2: {message}"):
        read(write(tmp_path, {"prompt": "fine"}, line))


def test_a_file_without_a_prompt_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no prompt"):
        read(write(tmp_path, ""))
