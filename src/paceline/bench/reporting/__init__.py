"""What was measured, as tables, charts, pages and logs."""
