"""Is speculation lossless here? A rule by enumeration, a decoder by agreement and by statistics, and a verdict."""

from paceline.audit.audit_run import audit, audit_only_rule
from paceline.audit.audit_verdict import Report

__all__ = ["Report", "audit", "audit_only_rule"]
