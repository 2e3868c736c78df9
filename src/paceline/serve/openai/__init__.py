"""OpenAI's API: what clients may send, the jobs that it becomes, and the answers."""
