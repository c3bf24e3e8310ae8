"""A server under rude traffic for a long time: no token wrong or lost, nothing left behind."""
