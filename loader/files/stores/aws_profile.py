"""Settings of AWS profiles for S3, if botocore is installed."""

import os
from datetime import UTC, datetime, timedelta
from typing import Any


def profile_options() -> dict[str, Any]:
    """Region and credentials of an AWS profile, which obstore does not read; empty if the
    environment has a key."""
    if "AWS_ACCESS_KEY_ID" in os.environ and "AWS_PROFILE" not in os.environ:
        return {}
    try:
        from botocore.session import Session
    except ImportError:
        return {}
    session = Session()
    found = session.get_credentials()
    region = session.get_config_variable("region")
    options = {"region": region} if region else {}
    if found is None or found.method in ("env", "iam-role", "container-role"):
        return options  # obstore reads and renews these
    return options | {"credential_provider": _Credentials(found)}


class _Credentials:
    """Credentials of botocore, refreshed every ten minutes."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __call__(self) -> dict[str, Any]:
        key = self._found.get_frozen_credentials()
        return {
            "access_key_id": key.access_key,
            "secret_access_key": key.secret_key,
            "token": key.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=10),
        }
