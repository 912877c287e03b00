from __future__ import annotations

import base64

import pytest

from loader.__main__ import decode, read_vocabulary


def test_tokens_decode_to_utf8_and_unknown_ids_are_shown(tmp_path):
    path = tmp_path / "v.tiktoken"
    parts = [b"h\xc3", b"\xa9", b" x", b"\xff"]
    path.write_bytes(b"".join(base64.b64encode(p) + b" %d\n" % i for i, p in enumerate(parts)))
    vocabulary = read_vocabulary(path)
    assert decode([0, 1, 2, 199_999, 3], vocabulary) == "hé x<|199999|>\ufffd"


@pytest.mark.parametrize("line", ["aGk=", "aGk= x", "a$k= 1", "aGk= 1 2"])
def test_a_file_that_is_no_vocabulary_is_refused_with_its_line(tmp_path, line):
    (tmp_path / "v").write_text(f"aGk= 0\n{line}\n")
    with pytest.raises(ValueError, match="v:2: not a vocabulary"):
        read_vocabulary(tmp_path / "v")
    with pytest.raises(ValueError, match="no vocabulary file"):
        read_vocabulary(tmp_path / "none")
