"""What of this machine, of folders and of a configuration decides whether exact checkpoints will work here.

Looks and tries with small files; changes nothing.  Each part returns findings, ``cli/doctor.py`` shows them.
"""
