"""Opens the oracle that the `[oracle]` table of a run or a command names."""

import os
from pathlib import Path

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.cache import checkpoint_dir
from nmoe_core.config.quality import OracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.oracle import Oracle
from nmoe_core.labels.oracles.heuristic import HeuristicOracle
from nmoe_core.labels.scores import QUALITY, Scale


def make_oracle(table: OracleTable, rubric: Rubric, base: Path) -> Oracle:
    """Make the oracle of kind `table.kind`. Weights are not loaded, and the server is not
    contacted, before the first question.

    The table's paths are relative to `base`. Raises ConfigError if the environment variable of
    the API key is not set (E-CONFIG-MISSING) or does not hold a key, and as the oracle.
    """
    if table.kind == "engine":
        from nmoe_core.labels.oracles.engine import EngineOracle

        assert table.engine.checkpoint is not None
        checkpoint = checkpoint_dir(base, table.engine.checkpoint)
        return EngineOracle(checkpoint, table.engine, rubric, table.extract_embedded)
    if table.kind == "http":
        from nmoe_core.labels.oracles.http import HttpOracle

        assert table.http is not None
        http = table.http
        if http.ca_file is not None:
            http = http.model_copy(update={"ca_file": str(base / http.ca_file)})
        return HttpOracle(http, rubric, _api_key(http.api_key_env), table.extract_embedded)
    scale = Scale.of(rubric)
    if not scale.with_same_grades(QUALITY):
        raise ConfigError(
            "the heuristic oracle grades only the dimensions of quality_v1",
            where="[oracle] kind",
            found=f"a rubric of {', '.join(scale.names)}",
            expected=", ".join(QUALITY.names),
            do="use an oracle that reads the rubric: kind = engine or http",
        )
    return HeuristicOracle(rubric.hash, scale)


def _api_key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            "the environment variable of the oracle's API key is not set",
            where=name,
            do=f"export {name}=...",
            code="E-CONFIG-MISSING",
        )
    # The message must not show the key.
    if not all("!" <= character <= "~" for character in key):
        raise ConfigError(
            "the oracle's API key cannot be sent in an HTTP header",
            where=name,
            found="a space, a control character or a character outside ASCII",
            expected="printable ASCII without spaces",
            do=f"export {name} with only the key",
        )
    return key
