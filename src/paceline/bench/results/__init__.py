"""What was measured, as records, metrics, tables, charts and pages."""
