"""The storage layer: all reading and writing of checkpoints and swap folders goes through here.

Knows files, hashes and durable publishing; knows nothing of torch or DeepSpeed.
"""
