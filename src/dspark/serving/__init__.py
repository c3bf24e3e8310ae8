"""The server: HTTP, JSON for clients, server-sent events. The only asynchronous code."""
