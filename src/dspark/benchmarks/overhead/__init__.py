"""What the server costs beside its own engine: `dspark bench overhead`."""
