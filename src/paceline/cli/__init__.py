"""The command line: one module per command. The only room that knows typer and rich; torch is imported when needed."""
