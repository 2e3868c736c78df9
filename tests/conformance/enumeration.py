"""Exact laws of acceptance rules. The machinery is the audit's: `src/paceline/audit/enumeration.py`."""

from paceline.audit.enumeration import *  # noqa: F403
