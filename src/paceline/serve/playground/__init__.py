"""The playground: the files of its page, and the endpoints that only the page uses."""
