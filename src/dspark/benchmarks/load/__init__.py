"""`dspark bench load`: policies under load, closed and open."""
