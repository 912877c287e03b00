"""Cache of the pictures of a run: an unchanged picture is not drawn again."""

from collections.abc import Callable
from pathlib import Path

from loader.files.regular import read_file
from nmoe_core.base.atomic import replacing, write_bytes
from nmoe_core.base.fingerprint import sha256_json

_LOOK = 4  # version of the style; a new number redraws every cached picture


def kept_picture(path: Path, made_from: object, draw: Callable[[], str]) -> str:
    """The Markdown of a picture. `made_from` is a JSON value that names all inputs of the picture.
    The picture is drawn unless the file `path` has the digest of `made_from` in its first line; the
    rest of the file is the Markdown."""
    digest = sha256_json([_LOOK, made_from])
    try:
        found, _, markdown = read_file(path).decode().partition("\n")
        if found == digest:
            return markdown
    except (OSError, UnicodeDecodeError):
        pass
    markdown = draw()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path):
        write_bytes(path, f"{digest}\n{markdown}".encode())
    return markdown
