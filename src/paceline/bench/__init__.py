"""The measuring instrument: our decoders and other libraries on the same prompts, in turns, and what follows."""
