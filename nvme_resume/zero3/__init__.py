"""The DeepSpeed seam: the ONLY package that touches DeepSpeed's internals.

Facts were read in DeepSpeed 0.19.8 (``runtime/zero/stage3.py``, ``runtime/swap_tensor/*``,
``runtime/engine.py``); ``supported`` says what else is accepted.
"""
