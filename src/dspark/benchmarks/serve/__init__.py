"""`dspark bench serve`: an OpenAI-compatible server under load, as its users see it."""
