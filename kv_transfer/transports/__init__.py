"""How bytes get from one pool to another; each with its fence. See ``base`` for what all of them promise."""
