"""Text to token ids and back. It knows no model and no request."""
