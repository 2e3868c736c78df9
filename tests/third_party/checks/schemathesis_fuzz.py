"""schemathesis on /openapi.json: no server error, and answers that are as documented."""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.config import (
    ChecksConfig,
    PositiveDataAcceptanceConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
)

_EXAMPLES = int(os.environ.get("PACELINE_EXAMPLES", "40"))  # for each endpoint
# Data of the schema may be refused for what a schema cannot state, such as the length of the context.
_CHECKS = ChecksConfig(positive_data_acceptance=PositiveDataAcceptanceConfig(enabled=False))
_CONFIG = SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(checks=_CHECKS)))

schema = schemathesis.openapi.from_url(f"{os.environ['PACELINE_URL']}/openapi.json", config=_CONFIG)


@schema.parametrize()
@settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_endpoint(case: Any) -> None:
    case.call_and_validate(timeout=60)
