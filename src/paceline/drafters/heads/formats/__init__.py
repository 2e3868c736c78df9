"""Trained heads in the formats of other projects."""

from paceline.drafters.heads.formats.export_head import export_head

__all__ = ["export_head"]
