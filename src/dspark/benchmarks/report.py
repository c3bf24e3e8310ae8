"""Tables for people. It measures nothing and knows no engine."""
