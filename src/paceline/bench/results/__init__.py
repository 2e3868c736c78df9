"""Measurements as records, metrics, tables, charts and pages."""
