"""Test whether speculation is lossless: a rule by enumeration, a decoder by equal texts and by statistics."""

from paceline.audit.audit_run import Report, audit, audit_only_rule

__all__ = ["Report", "audit", "audit_only_rule"]
