"""The server: an OpenAI-compatible endpoint over one engine thread."""
