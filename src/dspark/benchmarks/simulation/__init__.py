"""`dspark simulate`: the prefix scheduler on another machine, from numbers alone."""
