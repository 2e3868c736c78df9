"""Trained heads as other projects write them: read what they publish, write what they serve."""

from paceline.drafters.heads.formats.export_head import export_head

__all__ = ["export_head"]
