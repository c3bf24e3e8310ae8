"""`dspark audit`: is a server lossless, as far as its clients can see?"""
