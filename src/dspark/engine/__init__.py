"""Requests, pages and steps in flight. Nothing here reads a file, a clock or a prompt's text."""
