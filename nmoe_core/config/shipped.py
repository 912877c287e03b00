"""The configurations that come with the package, and the rubrics that go by a name."""

from __future__ import annotations

from pathlib import Path

from nmoe_core.base.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"


def find_rubric(named: str, base: Path) -> Path:
    """The file of a rubric.

    Args:
        named: A path, or the name of a rubric that comes with the package (`quality_v1`), also
            spelled as its path in the checkout (`configs/rubrics/quality_v1.toml`).
        base: Directory that a relative path starts from; a file there comes first.

    Raises:
        ConfigError: There is no such rubric (E-CONFIG-MISSING).
    """
    known = {path.stem: path for path in sorted(CONFIGS.glob("rubrics/*.toml"))}
    spelled = {f"configs/rubrics/{path.name}": path for path in known.values()}
    path = base / named
    if path.is_file():
        return path
    if named in known | spelled:
        return (known | spelled)[named]
    raise ConfigError(
        "no such rubric",
        where="[oracle] rubric",
        found=path,
        expected=f"a TOML file, or one of {', '.join(known)}",
        code="E-CONFIG-MISSING",
    )
