"""Hugging Face's ``Trainer`` (and what is built on it, TRL): checkpoint folders that are there whole or not at all.

``patches`` lists everything that is changed in their libraries and is the only way in; ``trainer`` knows the Trainer,
``folders`` how ranks build and publish a folder together, ``choice`` and ``rotation`` which of them to load and to
keep, ``callback`` what happens on SIGTERM.
"""
