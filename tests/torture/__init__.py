"""Kill -9 torture: a rank is killed at every storage call of a save, a load, a prune; a fresh process must go on.

``run`` is the program, ``scenarios`` what is done, ``points`` where it is killed, ``kill`` how, ``actors`` what the
killed and the surviving process do, ``evidence`` what must be true afterwards, ``forks`` how a point costs a second.
"""
