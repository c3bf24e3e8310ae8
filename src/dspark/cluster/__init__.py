"""More than one machine: replicas of the server on Ray Serve. It knows no model."""
