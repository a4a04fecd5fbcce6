import json
import os

import pytest

from kimi_jax.cli.report import check_writable, write_json


def test_a_report_is_written_whole_with_ordinary_rights(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    write_json(str(path), [{"text": "\u4e16"}, {"text": "b"}])
    assert json.loads(path.read_text(encoding="utf-8")) == [{"text": "\u4e16"}, {"text": "b"}]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 4  # one a result
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_old_report_and_nothing_else(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(str(path), [{"text": object()}])
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_json(str(link), [])
    assert link.is_symlink() and json.loads(target.read_text()) == []
    write_json(os.devnull, [])
    assert not os.path.isfile(os.devnull)


@pytest.mark.parametrize(("name", "message"), [("no/out.json", "no folder"), (".", "is a folder")])
def test_a_place_that_cannot_take_a_report_is_refused_at_once(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        check_writable(str(tmp_path / name))
